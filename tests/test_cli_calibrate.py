"""``ctta calibrate``: settings for a network, or the statement that adaptation does not help."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import invoke, network_error, output, user_error, write_images, write_network

import ctta
from ctta import models
from ctta.advise import Trial, Tuner
from ctta.advise.tuning import LEARNING_RATES, RESTORES
from ctta.cli.calibrate import calibrate
from ctta.datasets import CleanImages

FAST = ("--views", 1, "--batch-size", 8)


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (16, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "sample.npz", images=images, labels=generator.integers(0, 5, 16))
    return tmp_path / "sample.npz"


def test_every_setting_is_tried_on_the_hold_out_corruptions(sample: Path, tmp_path: Path) -> None:
    found = json.loads(
        output(calibrate, "--model", write_network(tmp_path), "--images", sample, *FAST, "--rounds", 2, "--json")
    )
    cotta = [(trial["lr"], trial["restore"]) for trial in found["trials"][2:]]
    assert cotta == [(lr, restore) for lr in LEARNING_RATES for restore in RESTORES] and cotta[0] == (1e-3, 0.01)
    assert [trial["method"] for trial in found["trials"][:2]] == ["Source", "BN Stats"]
    assert (found["images"], found["labels"], found["tried"], found["to_try"]) == (16, "given", 14, 14)
    assert found["steps"] == 2 * 4 * 2

    net = models.load(write_network(tmp_path))
    content, order = np.load(sample), np.random.default_rng(0).permutation(16)
    images, labels = content["images"][order], torch.from_numpy(content["labels"][order])
    floats = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
    assert found["threshold"] == round(ctta.calibrate_threshold(net, floats.split(8)), 3)
    assert found["clean_error"] == float((net(floats).argmax(1) != labels).double().mean())
    models_of_rows = {
        0: ctta.Source(net),
        1: ctta.BNStats(net),
        6: ctta.CoTTA(
            net,
            threshold=found["threshold"],
            optimizer=partial(torch.optim.Adam, lr=3e-3),
            restore=0.001,
            views=ctta.views.image_views(1),
        ),
    }
    for row, model in models_of_rows.items():
        wrong = 0
        for name in 2 * list(ctta.corruptions.HOLD_OUT):
            corrupted = torch.from_numpy(ctta.corruptions.corrupt(images, name, 5)).permute(0, 3, 1, 2) / 255
            for x, y in zip(corrupted.split(8), labels.split(8), strict=True):
                wrong += int((model(x).argmax(1) != y).sum())
        assert found["trials"][row]["error"] == wrong / 128


def test_the_output_is_a_table_and_a_line_that_runs(sample: Path, tmp_path: Path) -> None:
    text = output(calibrate, "--model", write_network(tmp_path), "--images", sample, *FAST)
    assert "16 images under speckle_noise, gaussian_blur, spatter, saturate at severity 5, scored against your" in text
    assert "Threshold by the rule of the reference implementation: 0." in text
    assert len([line for line in text.splitlines() if line.startswith("CoTTA  ")]) == 12
    lines = [line for line in text.splitlines() if line.startswith(("from ", "import ", "model = "))]
    assert lines[-1].startswith("model = ctta.CoTTA(net, threshold=0.")
    names: dict[str, object] = {"net": models.load(write_network(tmp_path))}
    exec("\n".join(lines), names)
    assert isinstance(names["model"], ctta.CoTTA)


def test_without_labels_the_predictions_on_clean_images_are_used(tmp_path: Path) -> None:
    """Also for folders that cannot be classes, because there are too few; five can be."""
    options = ["--model", write_network(tmp_path), "--images", tmp_path / "days", *FAST, "--budget", 0]
    write_images(tmp_path / "days", range(6))
    flat = json.loads(output(calibrate, *options, "--json"))
    assert (flat["labels"], flat["clean_error"]) == ("the network's answers on the clean images", None)
    assert "clean images (no labels)" in output(calibrate, *options)
    for path in (tmp_path / "days").glob("*.png"):
        path.unlink()
    for number in range(5):
        write_images(tmp_path / "days" / f"day {number}", range(2 * number, 2 * number + 2))
        labels = json.loads(output(calibrate, *options, "--json"))["labels"]
        assert labels == ("given" if number == 4 else flat["labels"])
    assert json.loads(output(calibrate, *options, "--no-labels", "--json"))["labels"] == flat["labels"]


def test_a_budget_ends_the_search_early(sample: Path, tmp_path: Path) -> None:
    options = ["--model", write_network(tmp_path), "--images", sample, *FAST, "--budget", 0]
    text = output(calibrate, *options)
    assert "12 of 14 trials were not run" in text and "could not be compared" in text
    assert json.loads(output(calibrate, *options, "--json"))["best"] is None


def test_ctrl_c_prints_the_finished_trials(sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Tuner.run

    def stopped(tuner: Tuner, **options: object) -> None:
        run(tuner, seconds=0)
        raise KeyboardInterrupt

    monkeypatch.setattr(Tuner, "run", stopped)
    result = invoke(calibrate, "--model", write_network(tmp_path), "--images", sample, *FAST)
    assert result.exit_code == 130 and "12 of 14 trials were not run" in result.stdout


def test_the_simplest_method_that_none_significantly_beats_is_recommended(tmp_path: Path) -> None:
    images = np.zeros((2, 16, 16, 3), np.uint8)
    tuner = Tuner(models.load(write_network(tmp_path)), CleanImages(images, None), num_views=1)

    def trial(method: str, num_wrong: int, **settings: float) -> Trial:
        return Trial(method, torch.arange(100).expand(3, 100) < num_wrong, **settings)

    def found(*num_wrong: int) -> tuple[str, float | None]:
        source, bn_stats, *cotta = num_wrong
        tuner.trials = [trial("Source", source), trial("BN Stats", bn_stats)]
        tuner.trials += [trial("CoTTA", wrong, learning_rate=lr, restore=0.01) for lr, wrong in enumerate(cotta)]
        best = tuner.best_candidate
        return tuner.recommended.method, None if best is None else best.learning_rate

    assert found(50, 48, 47, 46) == ("Source", 0)
    assert found(50, 40, 38, 39) == ("BN Stats", 0)
    assert found(50, 40, 20, 19) == ("CoTTA", 0)
    assert found(50, 40, 35, 19, 10, 30) == ("CoTTA", 2)
    assert found(50, 60, 70) == ("Source", 0)
    assert found(50, 20) == ("BN Stats", None)


def test_user_errors_are_one_line(sample: Path, tmp_path: Path) -> None:
    wrong = partial(user_error, calibrate, "--model", write_network(tmp_path), *FAST, "--images")
    assert "does not exist" in wrong(tmp_path / "nowhere")
    write_images(tmp_path / "flat", range(2))
    assert "the images have no labels" in wrong(tmp_path / "flat", "--labels")
    write_images(tmp_path / "tree" / "cat", range(2))
    assert "expected one subfolder per class, got 1 for 5 classes" in wrong(tmp_path / "tree", "--labels")
    content = np.load(sample)
    np.savez(tmp_path / "seven.npz", images=content["images"], labels=content["labels"] + 3)
    assert "labels from 3 to 7 for a network with 5 classes" in wrong(tmp_path / "seven.npz")
    (tmp_path / "empty").mkdir()
    assert "contains no images" in wrong(tmp_path / "empty")
    assert "expected logits of shape (N, classes)" in wrong(sample, "--model", write_network(tmp_path, "dense"))


def test_an_error_of_the_network_keeps_its_type_and_gets_a_note(tmp_path: Path) -> None:
    write_images(tmp_path / "flat", range(2))
    arguments = ["--model", write_network(tmp_path), *FAST, "--images", tmp_path / "flat", "--size", 20, 20]
    assert "The network failed on a batch of shape (2, 3, 20, 20)" in network_error(calibrate, *arguments)
