"""Evaluation of a method on a stream: metrics, and resuming after an interruption."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ctta
from ctta.data.datasets import ArrayDataset
from ctta.data.streams import Stream, continual
from ctta.errors import ConfigError, InputError
from ctta.evaluation import BatchRecord, read_result


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 5))


def stream(batch_size: int = 8) -> Stream:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    data = ArrayDataset(images, generator.integers(0, 5, 20), name="noise")
    return continual(data, names=("brightness", "contrast", "pixelate"), batch_size=batch_size)


def cotta() -> ctta.CoTTA:
    return ctta.CoTTA(net(), views=ctta.views.image_views(2), seed=3)


def without_costs(batches: tuple[BatchRecord, ...]) -> list[BatchRecord]:
    return [replace(batch, seconds=0.0, peak_mib=0) for batch in batches]


class StopError(Exception):
    pass


class StopAfter:
    """Interrupts an evaluation after a number of batches, which saves the state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, record: BatchRecord) -> None:
        self.count -= 1
        if self.count == 0:
            raise StopError


def evaluate_until_killed(count: int, folder: Path, *, save_every: float) -> None:
    """Interrupt an evaluation within a step, so that nothing more is saved."""
    model = cotta()
    adapt_step = model.adapt_step

    def raise_at_step(x: Tensor) -> Tensor:
        if model.num_steps == count:
            raise StopError
        return adapt_step(x)

    model.adapt_step = raise_at_step  # type: ignore[method-assign]
    with pytest.raises(StopError):
        ctta.evaluate(model, stream(), folder=folder, save_every=save_every)


def test_metrics_equal_a_plain_loop() -> None:
    result = ctta.evaluate(ctta.Tent(net()), stream())
    model = ctta.Tent(net())
    wrong = {domain: 0 for domain in stream().domains}
    for batch in stream():
        wrong[batch.domain] += int((model(batch.x).argmax(1) != batch.y).sum())
    assert result.errors == tuple(count / 20 for count in wrong.values())
    assert result.error == pytest.approx(sum(wrong.values()) / 60)
    assert result.worst[1] == max(result.errors)
    assert result.total.num_images == 60
    assert result.images_per_second > 0
    assert result.peak_mib is not None and result.peak_mib > 50
    assert result.method == "Tent"
    assert result.stream_hash == stream().hash
    assert result.settings["optimizer"] == "Adam(lr=0.001)"
    assert result.source == ctta.fingerprint(net())
    assert result.environment["threads"] == torch.get_num_threads()


def test_reset_at_domain_starts_every_segment_anew() -> None:
    result = ctta.evaluate(ctta.Tent(net(), optimizer=torch.optim.Adam), stream(), reset_at_domain=True)
    for number, domain in enumerate(stream().domains):
        alone = ctta.evaluate(ctta.Tent(net(), optimizer=torch.optim.Adam), single_domain(domain))
        assert without_costs(alone.batches) == [
            replace(batch, segment=0) for batch in without_costs(result.batches) if batch.segment == number
        ]
    continual = ctta.evaluate(ctta.Tent(net(), optimizer=torch.optim.Adam), stream())
    assert without_costs(continual.batches) != without_costs(result.batches)


def single_domain(domain: str) -> Stream:
    whole = stream()
    (segment,) = [segment for segment in whole.segments if segment.domain == domain]
    return whole.with_segments("one", [segment])


@pytest.mark.parametrize("reset_at_domain", [False, True])
@pytest.mark.parametrize("stops", [[1], [4], [8], [2, 3, 1, 1]])
def test_interrupted_evaluation_resumes_to_the_same_result(
    tmp_path: Path, stops: list[int], reset_at_domain: bool
) -> None:
    whole = ctta.evaluate(cotta(), stream(), reset_at_domain=reset_at_domain)
    for count in stops:
        with pytest.raises(StopError):
            ctta.evaluate(
                cotta(),
                stream(),
                reset_at_domain=reset_at_domain,
                folder=tmp_path,
                save_every=0,
                on_batch=StopAfter(count),
            )
    seen: list[BatchRecord] = []
    resumed = ctta.evaluate(
        cotta(), stream(), reset_at_domain=reset_at_domain, folder=tmp_path, save_every=0, on_batch=seen.append
    )
    assert len(seen) == len(stream()) - sum(stops)  # it did not start over
    assert without_costs(resumed.batches) == without_costs(whole.batches)
    assert read_result(tmp_path) == resumed
    assert not list(tmp_path.glob("*.safetensors"))


def test_batches_after_the_last_state_are_computed_again(tmp_path: Path) -> None:
    """The process was killed between a line and its state, or in the middle of a line."""
    whole = ctta.evaluate(cotta(), stream())
    evaluate_until_killed(3, tmp_path, save_every=0)
    lines = tmp_path / "batches.jsonl"
    with lines.open("a") as file:
        file.write(lines.read_text().splitlines()[0] + "\n")  # a fourth line that no state covers
        file.write('{"segment": 0, "sco')
    assert without_costs(ctta.evaluate(cotta(), stream(), folder=tmp_path).batches) == without_costs(whole.batches)


def test_state_is_saved_when_the_callback_raises(tmp_path: Path) -> None:
    whole = ctta.evaluate(cotta(), stream())
    with pytest.raises(StopError):
        ctta.evaluate(cotta(), stream(), folder=tmp_path, save_every=1e9, on_batch=StopAfter(4))
    seen: list[BatchRecord] = []
    resumed = ctta.evaluate(cotta(), stream(), folder=tmp_path, on_batch=seen.append)
    assert len(seen) == len(stream()) - 4
    assert without_costs(resumed.batches) == without_costs(whole.batches)


def test_state_ahead_of_its_lines_is_not_resumed_from(tmp_path: Path) -> None:
    """A folder may be copied in part; temporary files of killed saves are removed."""
    whole = ctta.evaluate(cotta(), stream())
    evaluate_until_killed(5, tmp_path, save_every=0)
    lines = tmp_path / "batches.jsonl"
    lines.write_text("".join(lines.read_text().splitlines(keepends=True)[:2]))
    (tmp_path / ".state-9.safetensors.abc.tmp").write_text("half")
    assert without_costs(ctta.evaluate(cotta(), stream(), folder=tmp_path).batches) == without_costs(whole.batches)
    assert not list(tmp_path.glob(".*.tmp"))


def test_evaluation_without_a_state_starts_over(tmp_path: Path) -> None:
    evaluate_until_killed(3, tmp_path, save_every=1e9)
    seen: list[BatchRecord] = []
    ctta.evaluate(cotta(), stream(), folder=tmp_path, on_batch=seen.append)
    assert len(seen) == len(stream())


def test_complete_evaluation_is_not_run_again(tmp_path: Path) -> None:
    first = ctta.evaluate(cotta(), stream(), folder=tmp_path)
    seen: list[BatchRecord] = []
    assert ctta.evaluate(cotta(), stream(), folder=tmp_path, on_batch=seen.append) == first
    assert not seen


def test_folder_of_another_evaluation_is_refused(tmp_path: Path) -> None:
    ctta.evaluate(cotta(), stream(), folder=tmp_path)
    with pytest.raises(ConfigError, match="stream_hash"):
        ctta.evaluate(cotta(), stream(batch_size=5), folder=tmp_path)
    with pytest.raises(ConfigError, match=r"settings\.views"):
        ctta.evaluate(ctta.CoTTA(net(), views=ctta.views.image_views(3), seed=3), stream(), folder=tmp_path)


CUSTOM_VIEWS = """
import sys, ctta, test_evaluation as test

def flip_vertically(model, x):
    return model(x.flip(2))

def stop(record):
    raise KeyboardInterrupt

model = ctta.TestAug(test.net(), views=(flip_vertically, lambda model, x: model(x)))
try:
    ctta.evaluate(model, test.stream(), folder=sys.argv[1], on_batch=stop)
except KeyboardInterrupt:
    pass
"""


def test_new_process_can_resume_with_custom_views(tmp_path: Path) -> None:
    """Functions cannot be saved, and their addresses differ from process to process."""
    for _ in range(3):
        search_path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-c", CUSTOM_VIEWS, str(tmp_path)], check=True, env=environment)
    assert len(read_result(tmp_path).batches) == 3


def test_model_that_has_adapted_is_refused() -> None:
    model = cotta()
    model(torch.rand(4, 3, 32, 32))
    with pytest.raises(ConfigError):
        ctta.evaluate(model, stream())


def test_stream_without_labels_has_confidences_and_counts(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(3):
        Image.new("RGB", (32, 32), (90 * number, 0, 0)).save(tmp_path / f"{number}.png")
    result = ctta.evaluate(
        ctta.Source(net()), ctta.data.streams.folder(tmp_path, batch_size=2), folder=tmp_path / "evaluation"
    )
    probabilities = ctta.Source(net())(next(iter(ctta.data.streams.folder(tmp_path))).x).softmax(1)
    assert not result.is_labeled and result.total.num_images == sum(result.num_predicted) == 3
    assert list(result.num_predicted) == probabilities.argmax(1).bincount(minlength=5).tolist()
    assert result.confidence == pytest.approx(float(probabilities.max(1).values.mean()))
    assert read_result(tmp_path / "evaluation") == result
    for name in ("error", "errors", "value", "calibration_error", "worst", "interval"):
        with pytest.raises(InputError):
            getattr(result, name)


def test_non_finite_loss_is_recorded_as_missing(tmp_path: Path) -> None:
    broken = net()
    with torch.no_grad():
        torch.nn.init.constant_(broken[4].get_parameter("bias")[:1], float("nan"))
    result = ctta.evaluate(ctta.Tent(broken), stream(), folder=tmp_path)
    assert result.num_skipped == len(stream())
    assert result.error == 1
    assert all(json.loads(line)["loss"] is None for line in (tmp_path / "batches.jsonl").read_text().splitlines())


@pytest.mark.parametrize(("has_resource", "is_known"), [(True, True), (False, False)])
def test_peak_memory_is_missing_where_the_system_does_not_report_it(
    has_resource: bool, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_text = Path.read_text

    def read_text_without_proc(path: Path, encoding: str | None = None, errors: str | None = None) -> str:
        if path.is_relative_to("/proc"):  # which macOS and Windows do not have
            raise FileNotFoundError(path)
        return read_text(path, encoding, errors)

    monkeypatch.setattr(Path, "read_text", read_text_without_proc)
    if not has_resource:
        monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    result = ctta.evaluate(ctta.Source(net()), stream())
    assert (result.peak_mib is not None) == is_known
    monkeypatch.undo()
    assert BatchRecord.from_json(result.batches[0].to_json()) == result.batches[0]
