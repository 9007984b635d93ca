"""``ctta adapt``: predictions for a folder of images, resumed after every kind of interruption."""

import csv
import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from command_line import invoke, network_error, output, user_error, write_images, write_network
from filelock import FileLock
from killed_runs import kill_repeatedly
from torch import nn

import ctta
from ctta import models
from ctta.adapt import adapt_folder, run
from ctta.adapt.run import InferenceBatch, InferenceRun
from ctta.cli.adapt import adapt
from ctta.data.datasets.image_files import read_images
from ctta.errors import ConfigError
from ctta.guard import Guarded

FEW_VIEWS = ("--method", "cotta", "--set", "views=2", "--set", "threshold=1.1")


class CameraFolder:
    """A folder of images, and the options of a command on them."""

    def __init__(self, root: Path, count: int = 20) -> None:
        self.root, self.images = root, root / "camera"
        self.table, self.state = root / "table.csv", root / "state.safetensors"
        self.paths = write_images(self.images, range(count))
        self.options = ["--model", write_network(root), "--images", self.images, "--batch-size", 4, *FEW_VIEWS]
        self.resumable = [*self.options, "--out", self.table, "--state", self.state]

    def network(self) -> nn.Module:
        return models.load(write_network(self.root))

    def rows(self, table: Path | None = None) -> list[dict[str, str]]:
        with (table or self.table).open(newline="") as file:
            return list(csv.DictReader(file))

    def uninterrupted(self, *options: str) -> bytes:
        """Return the table of a run without a state and without interruption."""
        table = self.root / "uninterrupted.csv"
        output(adapt, *self.options, "--out", table, *options)
        return table.read_bytes()


@pytest.fixture
def camera(tmp_path: Path) -> CameraFolder:
    return CameraFolder(tmp_path)


def test_every_image_is_predicted_while_adapting(camera: CameraFolder) -> None:
    write_images(camera.images / "later", range(20, 22))
    text = output(adapt, *camera.options, "--out", camera.table)
    assert f"{camera.table} has 22 rows, 22 of them new." in text and "cotta: mean confidence 0." in text
    model = ctta.CoTTA(models.load(write_network(camera.root)), views=ctta.views.image_views(2), threshold=1.1)
    paths = [*camera.paths, camera.images / "later/020.png", camera.images / "later/021.png"]
    for number in range(6):
        batch = paths[4 * number : 4 * number + 4]
        confidence, predicted = model(read_images(batch, None)).double().softmax(1).max(1)
        for path, row, probability, label in zip(
            batch, camera.rows()[4 * number :], confidence, predicted, strict=False
        ):
            assert row == {
                "image": path.relative_to(camera.images).as_posix(),
                "batch": str(number),
                "class": str(int(label)),
                "confidence": f"{float(probability):.6f}",
                "error": "",
            }
    assert len(camera.rows()) == 22


def test_the_default_is_that_of_ctta_adapt(camera: CameraFolder) -> None:
    summary = json.loads(output(adapt, *camera.options[:-6], "--no-guard", "--out", camera.table, "--json"))
    model = ctta.adapt(camera.network())
    predicted = torch.cat([model(read_images(camera.paths[i : i + 4], None)).argmax(1) for i in range(0, 20, 4)])
    assert summary["method"] == "vane" and [int(row["class"]) for row in camera.rows()] == predicted.tolist()


def test_class_names_and_comparison_with_the_source(camera: CameraFolder) -> None:
    names = camera.root / "names.txt"
    names.write_text("bird\ncat\ndog, small\nfrog\nship\n")
    summary = json.loads(
        output(adapt, *camera.options, "--out", camera.table, "--classes", names, "--compare", "--json")
    )
    rows = camera.rows()
    words = names.read_text().splitlines()
    source = models.load(write_network(camera.root))(read_images(camera.paths, None)).argmax(1)
    for row, label in zip(rows, source.tolist(), strict=True):
        assert row["name"] == words[int(row["class"])]
        assert (row["source_class"], row["source_name"]) == (str(label), words[label])
    assert summary["num_changed"] == sum(row["class"] != row["source_class"] for row in rows)
    assert (summary["num_images"], summary["num_skipped"], summary["method"]) == (20, 0, "cotta")
    mean = sum(float(row["confidence"]) for row in rows) / 20
    assert summary["confidence"] == pytest.approx(mean, abs=1e-5)


def test_the_table_is_identical_after_kills(camera: CameraFolder) -> None:
    expected = camera.uninterrupted()
    # Where, at which call, seconds between saves; and how many rows the table then has.
    kills = {("rows", 3, 1000): 8, ("state", 1, 0): 4, ("state", 3, 0): 12, ("rows", 2, 0): 12, ("rows", 1, 0): 12}
    kill_repeatedly(kills, camera.table, *camera.resumable)
    assert "20 rows, 8 of them new" in output(adapt, *camera.resumable)
    assert camera.table.read_bytes() == expected


def test_ctrl_c_waits_for_the_step_and_loses_nothing(camera: CameraFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = camera.uninterrupted()
    process_batch = InferenceRun.process_batch

    def interrupted(run: InferenceRun, batch: InferenceBatch, x: torch.Tensor) -> None:
        if run.model.num_steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
        process_batch(run, batch, x)

    with monkeypatch.context() as patch:
        patch.setattr(InferenceRun, "process_batch", interrupted)
        result = invoke(adapt, *camera.resumable)
    assert result.exit_code == 130
    assert f"Stopped. The adapted model is saved in {camera.state}; run the same command again" in result.stderr
    assert len(camera.rows()) == 12
    text = output(adapt, *camera.resumable)
    assert "8 of them new" in text and "processed again" not in text
    assert camera.table.read_bytes() == expected


def test_a_second_ctrl_c_interrupts_the_step_and_loses_only_that(
    camera: CameraFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = camera.uninterrupted()
    process_batch = InferenceRun.process_batch

    def stopped(run: InferenceRun, batch: InferenceBatch, x: torch.Tensor) -> None:
        process_batch(run, batch, x)
        if run.model.num_steps == 3:  # the model is one step ahead of what may be saved
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(InferenceRun, "process_batch", stopped)
        patch.setattr(run, "SECONDS_BETWEEN_SAVES", 0)
        result = invoke(adapt, *camera.resumable)
    assert result.exit_code == 130
    assert "12 of them new" in output(adapt, *camera.resumable)
    assert camera.table.read_bytes() == expected


def test_new_images_are_processed_later(camera: CameraFolder) -> None:
    output(adapt, *camera.resumable)
    first = camera.table.read_text()
    assert output(adapt, *camera.resumable) == f"No new images: all 20 are in {camera.table}.\n"
    early, late = write_images(camera.images / "000", range(2))
    output(adapt, *camera.resumable)
    assert camera.table.read_text().startswith(first)
    assert [(row["image"], row["batch"]) for row in camera.rows()[20:]] == [("000/000.png", "5"), ("000/001.png", "5")]
    model = ctta.load(camera.state, models.load(write_network(camera.root)))
    assert model.num_steps == 6 and model.unwrapped.hyperparameters["threshold"] == 1.1
    early.unlink()
    late.unlink()
    assert "No new images: all 22 are" in output(adapt, *camera.resumable)


def test_another_folder_continues_the_stream_with_its_settings(camera: CameraFolder) -> None:
    output(adapt, *camera.resumable)
    write_images(camera.root / "next day", range(30, 34))
    table = camera.root / "tables" / "next.csv"
    arguments = ["--model", write_network(camera.root), "--images", camera.root / "next day", "--out", table]
    assert "4 of them new" in output(adapt, *arguments, "--state", camera.state)
    assert [row["batch"] for row in camera.rows(table)] == ["5"] * 4


def test_a_broken_image_ends_a_strict_run_and_can_be_replaced(camera: CameraFolder) -> None:
    expected = camera.uninterrupted()
    content = camera.paths[13].read_bytes()
    camera.paths[13].write_bytes(content[:50])
    assert "013.png is missing, truncated or not an image" in user_error(adapt, *camera.resumable, "--strict")
    assert len(camera.rows()) == 12
    camera.paths[13].write_bytes(content)
    assert "8 of them new" in output(adapt, *camera.resumable)
    assert camera.table.read_bytes() == expected


def test_temporary_files_of_killed_saves_are_removed(camera: CameraFolder) -> None:
    (camera.root / f".{camera.state.name}.0123abcd.tmp").write_bytes(b"half a state")
    output(adapt, *camera.resumable)
    assert not list(camera.root.glob(".*"))


def test_rows_that_the_state_does_not_include_are_backed_up(camera: CameraFolder) -> None:
    output(adapt, *camera.resumable)
    finished = camera.table.read_bytes()
    camera.state.unlink()
    assert "exists but there is no state at" in user_error(adapt, *camera.resumable)
    ctta.save(
        ctta.CoTTA(models.load(write_network(camera.root)), views=ctta.views.image_views(2), threshold=1.1),
        camera.state,
    )
    assert "20 images were processed again" in output(adapt, *camera.resumable)
    assert camera.table.with_name("table.csv.before").read_bytes() == finished == camera.table.read_bytes()


def test_user_errors_are_one_line(camera: CameraFolder) -> None:
    model, options = write_network(camera.root), camera.options
    wrong = partial(user_error, adapt, *options, "--out", camera.root / "other.csv")
    assert "no method 'cota' (did you mean 'cotta'?); expected one of source" in wrong("--method", "cota")
    assert "'restor' (did you mean 'restore'?); it has optimizer, lr, decay, restore," in wrong("--set", "restor=0.1")
    assert "restore must be a number such as 0.01, got 'much'" in wrong("--set", "restore=much")
    assert "restore must lie between 0 and 1, got 7" in wrong("--set", "restore=7")
    assert "Tent has no setting 'views'" in wrong("--method", "tent")
    assert "nowhere does not exist: check the path" in wrong("--images", camera.root / "nowhere")
    assert "network.py is a file; expected a folder of images" in wrong("--images", camera.root / "network.py")
    (camera.root / "empty").mkdir()
    assert "empty contains no images (.bmp, .jpeg, " in wrong("--images", camera.root / "empty")
    assert "unknown network" in wrong("--model", "resnet50")
    assert "cannot use device 'cuda:99'" in wrong("--device", "cuda:99")
    names = camera.root / "names.txt"
    names.write_text("one\ntwo\n")
    assert "2 class names for a network with 5 classes" in wrong("--classes", names)
    assert "is not UTF-8 text" in wrong("--classes", camera.paths[0])
    names.write_text("")
    assert "names.txt is empty" in wrong("--classes", names)
    assert not (camera.root / "other.csv").exists()
    output(adapt, *camera.resumable)
    assert "table.csv exists but no state was given" in user_error(adapt, *options, "--out", camera.table)
    assert "was made with other settings (restore: 0.01 → 0.5)" in user_error(
        adapt, *camera.resumable, "--set", "restore=0.5"
    )
    assert "saved by cotta, not by tent" in user_error(
        adapt,
        "--model",
        model,
        "--images",
        camera.images,
        "--out",
        camera.table,
        "--state",
        camera.state,
        "--method",
        "tent",
    )
    assert "fingerprint" in user_error(adapt, *camera.resumable, "--model", write_network(camera.root, "other_weights"))
    assert "has the columns image,batch,class,confidence,error" in user_error(adapt, *camera.resumable, "--compare")
    (camera.root / "long.csv").write_text("x" * 200_000)
    assert "is not a table of predictions" in user_error(adapt, *camera.resumable, "--out", camera.root / "long.csv")
    for path in (camera.state, camera.table):
        with FileLock(path.with_name(f"{path.name}.lock")):
            assert f"{path} is in use by another process" in user_error(adapt, *camera.resumable)
    frozen = ctta.load(camera.state, models.load(model)).freeze()
    ctta.save(frozen, camera.state)
    assert "was saved frozen" in user_error(adapt, *camera.resumable)


def test_size_must_be_positive(camera: CameraFolder) -> None:
    result = invoke(adapt, *camera.options, "--out", camera.table, "--size", 0, 16)
    assert result.exit_code == 2 and "height and width must be at least 1, got 0 16" in result.stderr
    with pytest.raises(ConfigError):
        adapt_folder(models.load(write_network(camera.root)), camera.images, camera.table, size=(0, 16))
    assert not camera.table.exists()


def test_an_unknown_method_is_rejected_with_and_without_a_state(camera: CameraFolder) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError):
            adapt_folder(
                models.load(write_network(camera.root)), camera.images, camera.table, method="cota", state=camera.state
            )
        output(adapt, *camera.resumable)


def test_an_error_of_the_network_keeps_its_type_and_gets_a_note(camera: CameraFolder) -> None:
    arguments = [*camera.options, "--out", camera.table, "--size", 32, 32]
    assert "The network failed on a batch of shape (4, 3, 32, 32)" in network_error(adapt, *arguments)


def test_a_guard_is_kept_by_the_state(camera: CameraFolder) -> None:
    """Without events the table is the same as without a guard; loading is logged."""
    text = output(adapt, *camera.options, "--out", camera.table, "--state", camera.state)
    assert camera.table.read_bytes() == camera.uninterrupted("--no-guard")
    assert "Guard: no events." in text
    write_images(camera.images / "later", range(20, 24))
    outcome = json.loads(output(adapt, *camera.resumable, "--json"))
    assert outcome["num_images"] == 4 and outcome["method"] == "cotta" and set(outcome["events"]) == {"load"}
    lines = (camera.root / "table.audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["load"]


def test_a_state_goes_on_as_it_was_made(camera: CameraFolder) -> None:
    text = output(adapt, *camera.resumable, "--no-guard")
    assert "Guard: off.\n" in text and not isinstance(ctta.load(camera.state, camera.network()), Guarded)
    write_images(camera.images / "later", range(20, 24))
    assert "was saved without a guard and resumes so: do not ask for guard" in user_error(
        adapt, *camera.resumable, "--guard"
    )
    assert "Guard: off, because the state was made without one" in output(adapt, *camera.resumable)
    other = [*camera.options, "--out", camera.root / "other.csv", "--state", camera.root / "other.safetensors"]
    output(adapt, *other)
    assert isinstance(ctta.load(camera.root / "other.safetensors", camera.network()), Guarded)
    assert "was saved with a guard and resumes so" in user_error(adapt, *other, "--no-guard")
