"""Files of streams that are damaged, missing or of other settings: each is told apart, and the others are served."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from serving import Client, infer_request, make_images, make_png, make_tent, serve_in_thread

import ctta
from ctta.errors import DamagedCheckpointError, DataError
from ctta.io.tensors import write_tensors
from ctta.serve import Limits, Service

WINDOW = 6


def build(folder: Path, **options: Any) -> Service:
    options = {"window_size": WINDOW, "update_every": 1, "num_workers": 1} | options
    return Service(make_tent(folder), folder / "state", **options)


def snapshot(folder: Path, name: str) -> Path:
    return folder / "state/streams" / name / "1"


def read_window(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with safe_open(path / "window.safetensors", framework="pt") as file:
        header = json.loads(file.metadata()["stream"])
    # Copies, as the file is mapped, and overwritten below.
    return {name: tensor.clone() for name, tensor in load_file(path / "window.safetensors").items()}, header


def rewrite_window(path: Path, *, images: torch.Tensor | None = None, **summary: Any) -> None:
    """Write a window with a valid checksum."""
    tensors, header = read_window(path)
    tensors["images"] = tensors["images"] if images is None else images
    header["summary"] |= summary
    write_tensors(path / "window.safetensors", tensors, "stream", header)


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        (path / name).write_bytes(change((path / name).read_bytes()))

    return apply


def write_nan_weights(path: Path) -> None:
    model = ctta.load(path / "state.safetensors", make_tent(path).copy_of_source())
    with torch.no_grad():
        next(model.get_submodule("student").parameters()).fill_(torch.nan)
    ctta.save(model, path / "state.safetensors")


def remove(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def flip(content: bytes, position: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 1 << 4
    return bytes(changed)


STATE, IMAGES = "state.safetensors", "window.safetensors"
DAMAGE: dict[str, Callable[[Path], None]] = {
    "state-truncated": edit(STATE, lambda content: content[:-100]),
    "state-empty": edit(STATE, lambda _: b""),
    "state-missing": lambda path: (path / STATE).unlink(),
    "state-bit": edit(STATE, lambda content: flip(content, -50)),
    "state-nan": write_nan_weights,
    "window-truncated": edit(IMAGES, lambda content: content[:-100]),
    "window-garbled": edit(IMAGES, lambda _: b"not a window"),
    "window-missing": lambda path: (path / IMAGES).unlink(),
    "window-bit": edit(IMAGES, lambda content: flip(content, -50)),
    "window-header": edit(IMAGES, lambda content: content.replace(b"used_at", b"used_bt")),
    "window-nan": lambda path: rewrite_window(path, images=torch.full((2, 3, 16, 16), torch.nan)),
    "window-flat": lambda path: rewrite_window(path, images=torch.zeros(16)),
    "window-text": lambda path: rewrite_window(path, used_at="yesterday"),
    "snapshot-gone": remove,
}
SOUND = ("sound", "sound2")


@pytest.mark.parametrize("is_running", [False, True], ids=["stopped", "running"])
def test_damaged_streams_start_over_and_the_others_are_served(tmp_path: Path, is_running: bool) -> None:
    """The files are damaged while the service is stopped, or while it runs and the streams are on disk."""
    names = [*DAMAGE, *SOUND]
    service = build(tmp_path)
    for name in names:
        stream = service.factory.create(name)
        stream.infer(make_images(4), adapt=True)
        service.factory.snapshots.write(stream)
    service.release()

    def damage() -> None:
        for name, apply in DAMAGE.items():
            apply(snapshot(tmp_path, name))

    if not is_running:
        damage()
        del names[names.index("snapshot-gone")]  # no trace of it is left, so it is new and not damaged
    service = build(tmp_path, limits=Limits(max_live_streams=1))
    with serve_in_thread(service) as client:
        if is_running:
            damage()
        assert client.json("GET", "/streams?limit=100")["total"] >= len(SOUND)
        for name in names:
            assert client.infer(name, make_images(4))["update"] == (2 if name in SOUND else 1), name
        damaged = [name for name in names if name not in SOUND]
        metrics = client.call("GET", "/metrics").text
        assert f'ctta_events_total{{kind="damaged"}} {len(damaged)}.0\n' in metrics
        assert "ctta_failures_total{" not in metrics
    events = [json.loads(line) for line in (tmp_path / "state/audit.jsonl").read_text().splitlines()]
    assert sorted(event["stream"] for event in events if event["kind"] == "damaged") == sorted(damaged)
    set_aside = {path.name.partition("-")[2].partition("-")[2] for path in service.state_dir.glob("streams/.damaged-*")}
    assert set_aside == set(damaged)
    service = build(tmp_path)
    assert sorted(service.store.slots) == sorted(names)
    assert all(service.factory.read(name).num_updates == (2 if name in SOUND else 1) for name in names)
    service.release()


def test_a_damaged_stream_is_moved_aside_at_the_start(tmp_path: Path) -> None:
    service = Service(make_tent(tmp_path), tmp_path / "state")
    for name in ("a", "b", "c"):
        service.factory.snapshots.write(service.factory.create(name))
    service.release()
    streams = tmp_path / "state/streams"
    (streams / "a/1/window.safetensors").write_bytes(b"not this")
    (streams / "c/1/window.safetensors").unlink()
    again = Service(make_tent(tmp_path), tmp_path / "state")
    assert list(again.store.slots) == ["b"]
    lines = [json.loads(line) for line in (tmp_path / "state/audit.jsonl").read_text().splitlines()]
    assert [line["stream"] for line in lines if line["kind"] == "damaged"] == ["a", "c"]
    kept = sorted(path.parents[1].name.rpartition("-")[2] for path in streams.glob(".damaged-*/1/state.safetensors"))
    assert kept == ["a", "c"]
    again.release()


def test_a_stream_with_nan_weights_is_damaged(tmp_path: Path) -> None:
    service = build(tmp_path)
    service.factory.snapshots.write(service.factory.create("a"))
    write_nan_weights(snapshot(tmp_path, "a"))
    with pytest.raises(DamagedCheckpointError, match="values that are not finite"):
        service.factory.read("a")
    service.release()


def assert_withheld(response: Any, secret: str) -> None:
    assert response.status_code == 500, response.text
    assert secret not in response.text and "see the service's log" in response.json()["error"]


def test_a_state_of_other_settings_is_the_operators_mistake(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It stays where it is, the log says what to do, and another stream is served."""
    service = build(tmp_path)
    for name in ("a", "b"):
        service.factory.snapshots.write(service.factory.create(name))
    ctta.save(make_tent(tmp_path, batch_stats=0.5), snapshot(tmp_path, "a") / "state.safetensors")
    service.release()
    with serve_in_thread(build(tmp_path)) as client, caplog.at_level(logging.ERROR, "ctta.serve"):
        assert_withheld(client.call("POST", "/streams/a/image", data=make_png()), "batch_stats")
        (record,) = [record for record in caplog.records if record.name == "ctta.serve"]
        assert record.exc_info and "batch_stats=0.5" in str(record.exc_info[1])
        assert "or delete the stream" in str(record.exc_info[1])
        assert 'ctta_failures_total{cause="internal"} 1.0\n' in client.call("GET", "/metrics").text
        assert client.infer("b", make_images(4))["update"] == 1
        assert snapshot(tmp_path, "a").exists()
        client.json("DELETE", "/streams/a")
        assert client.infer("a", make_images(4))["update"] == 1


def test_class_names_that_do_not_fit_are_the_operators_mistake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without an image size this is not known before the first image."""
    service = build(tmp_path, class_names=["cat", "dog"], window_size=0)
    with serve_in_thread(service) as client, caplog.at_level(logging.ERROR, "ctta.serve"):
        assert_withheld(client.call("POST", "/streams/a/image", data=make_png()), "class names")
        (record,) = [record for record in caplog.records if record.name == "ctta.serve"]
        assert record.exc_info and "2 class names for a network with 5 classes" in str(record.exc_info[1])
        assert client.call("GET", "/streams/a").status_code == 404
        assert client.infer("a", make_images(4))["update"] == 1  # tensors need no names


def test_a_damaged_description_of_the_service_is_one_sentence(tmp_path: Path) -> None:
    build(tmp_path).release()
    for content in (b"", b"{", b"[1]", b"\xff"):
        (tmp_path / "state/service.json").write_bytes(content)
        with pytest.raises(DataError, match=r"service\.json.* is damaged \(.*\): delete this file") as raised:
            build(tmp_path)
        assert "\n" not in str(raised.value)
    (tmp_path / "state/service.json").unlink()
    build(tmp_path).release()


class ScalarPerImage(torch.nn.Module):
    """Return (N,), which are no logits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means: torch.Tensor = x.flatten(1).mean(1)
        return means


class Unlearned(ctta.Tent):
    """Learn, and then predict something that is no output of the protocol."""

    def adapt_step(self, x: torch.Tensor) -> torch.Tensor:
        super().adapt_step(x)
        values: torch.Tensor = ScalarPerImage()(x)
        return values


def test_an_output_that_cannot_be_sent_does_not_count(tmp_path: Path) -> None:
    service = Service(Unlearned(make_tent(tmp_path).copy_of_source()), tmp_path / "state", window_size=0)
    with serve_in_thread(service) as client:
        client.infer("a", make_images(4), adapt=False)
        response = client.call("POST", "/v2/models/ctta/infer", json=infer_request("a", make_images(4)))
        assert_withheld(response, "Dimension")
        assert client.json("GET", "/streams/a")["updates"] == 0


class CopyFails(torch.nn.Module):
    """Run out of memory, as torch does on the CPU, when it is copied on request."""

    fails = False

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(x)
        return logits

    def __getstate__(self) -> dict[str, Any]:
        if CopyFails.fails:
            torch.empty(2**62, dtype=torch.uint8)
        return dict(vars(self))


def test_running_out_of_memory_while_a_state_is_loaded_blames_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def service() -> Service:
        model = ctta.Tent(CopyFails(make_tent(tmp_path).copy_of_source()))
        return Service(model, tmp_path / "state", window_size=0, num_workers=1, limits=Limits(max_live_streams=1))

    with serve_in_thread(service()) as client:
        first = client.infer("a", make_images(4))
        state = client.state("a")
        client.infer("b", make_images(4))  # "a" is on disk now
        monkeypatch.setattr(CopyFails, "fails", True)
        for response in (
            client.call("PUT", "/streams/c/state", data=state),
            client.call("POST", "/streams/a/image", data=make_png()),
        ):
            assert response.status_code == 500 and response.headers["Retry-After"], response.text
            assert "alloc" not in response.text
        monkeypatch.setattr(CopyFails, "fails", False)
        assert client.json("PUT", "/streams/c/state", data=state)["updates"] == 1
        assert client.infer("a", make_images(4, 1))["update"] == first["update"] + 1


def test_names_of_streams_are_checked_everywhere(tmp_path: Path) -> None:
    message = "a stream name starts with a letter or digit"
    with serve_in_thread(build(tmp_path)) as client:
        for name in (".hidden", "a%20b", "a%0A", "-", "x" * 65):
            for method, path in (
                ("GET", ""),
                ("DELETE", ""),
                ("POST", "/image"),
                ("POST", "/reset"),
                ("GET", "/state"),
                ("PUT", "/state"),
            ):
                response = client.call(method, f"/streams/{name}{path}", data=b"")
                assert response.status_code == 400 and message in response.json()["error"], (method, path, name)
        response = client.call("POST", "/v2/models/ctta/infer", json=infer_request(".hidden", make_images(1)))
        assert response.status_code == 400 and message in response.json()["error"]
        description = Client(client.address).json("GET", "/openapi.json")["paths"]["/streams/{name}"]["get"]
        assert description["parameters"][0]["schema"]["pattern"].startswith("^[A-Za-z0-9]")


def test_images_of_several_sizes_are_resized_to_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a size, a stream would never have a window of images; the answer, the history and the log say so."""
    sides = (16, 20, 12, 16, 30)
    with serve_in_thread(build(tmp_path)) as client, caplog.at_level(logging.WARNING, "ctta.serve"):
        answers = [client.json("POST", "/streams/a/image", data=make_png(side=side)) for side in sides]
        assert [answer["resized"] for answer in answers] == [None, [16, 16], [16, 16], None, [16, 16]]
        assert [answer["adapted"] for answer in answers] == [False] * 3 + [True] * 2
        assert [answer["batch_stats"] for answer in answers] == [0, 0, 0, 4 / 52, 5 / 53]
        client.infer("b", make_images(4))
        assert client.json("POST", "/streams/b/image", data=make_png(side=24))["resized"] == [16, 16]
        summary = client.json("GET", "/streams/a")
        assert (summary["image_size"], summary["resized"]) == ([16, 16], 3)
        assert [event["kind"] for event in summary["events"]] == ["new", "resized"]
        (line, _) = [record.getMessage() for record in caplog.records if "resized" in record.getMessage()]
        assert line.startswith("stream a: ") and "16x16" in line and "--size" in line
    with serve_in_thread(build(tmp_path)) as client:  # after a restart
        answer = client.json("POST", "/streams/a/image", data=make_png(side=40))
        assert answer["resized"] == [16, 16] and answer["adapted"]
        assert client.json("GET", "/streams/a")["resized"] == 4
        client.json("POST", "/streams/a/reset")
        assert client.json("GET", "/streams/a")["image_size"] is None


def test_the_answer_says_how_images_were_normalized(tmp_path: Path) -> None:
    model = make_tent(tmp_path, batch_stats=0.5)
    service = Service(model, tmp_path / "state", window_size=WINDOW)
    with serve_in_thread(service) as client:
        fractions = [client.infer("a", make_images(1, seed))["batch_stats"] for seed in range(5)]
        assert fractions == [0, 0, 0, 0.5, 0.5]  # by the source network until there are four
        assert client.infer("b", make_images(4), adapt=False)["batch_stats"] == 0.5
    flat = ctta.Tent(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LayerNorm(768), torch.nn.Linear(768, 5)))
    with serve_in_thread(Service(flat, tmp_path / "flat")) as client:
        assert np.array_equal(client.infer("a", make_images(4))["batch_stats"], 0)
