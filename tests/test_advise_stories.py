"""What the tool says about a network is checked against labels that it was not given."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import invoke, user_error
from hand_made_results import make_result
from numpy.typing import NDArray
from PIL import Image
from small_group_norm import MEAN, STD, read_sample, train_group_norm
from torch import nn

import ctta
from ctta.advise import Race, RaceRow, check_input, label_images
from ctta.advise import influence as influence_module
from ctta.advise.candidates import Candidate
from ctta.advise.images import ImageStreams
from ctta.advise.race import RaceSettings, WorkProgress, _refine
from ctta.cli.adapt import adapt
from ctta.cli.advise import certify
from ctta.data.datasets import CleanImages
from ctta.evaluation.display import format_percent, subtract_printed, write_headline
from ctta.evaluation.metrics import ERROR
from ctta.models import Normalized

HALF = (0.5, 0.5, 0.5)


def count_errors(net: nn.Module, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> float:
    with torch.no_grad():
        predicted = net(torch.from_numpy(images).permute(0, 3, 1, 2) / 255).argmax(1).numpy()
    return float((predicted != labels).mean())


@pytest.mark.parametrize(("mean", "std"), [((0.0,) * 3, (1.0,) * 3), ((0.7,) * 3, HALF)])
def test_a_wrong_normalization_of_a_group_norm_network_is_found_without_labels(
    mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    net, (images, labels) = train_group_norm(), read_sample()
    images, labels = images[1500:], labels[1500:]
    right, wrong = Normalized(net, MEAN, STD), Normalized(net, mean, std)
    assert count_errors(wrong, images, labels) > count_errors(right, images, labels) + 0.02
    unlabeled = CleanImages(images, None)
    assert check_input(right, label_images(right, unlabeled)).is_expected
    found = check_input(wrong, label_images(wrong, unlabeled))
    assert found.expected is not None and "CIFAR-10's mean and std" in (found.expected.name, *found.similar)


def test_frames_of_another_size_are_noticed(tmp_path: Path) -> None:
    images, labels = read_sample()
    (tmp_path / "frames").mkdir()
    for number, image in enumerate(images[:32]):
        Image.fromarray(image).resize((128, 128), Image.Resampling.BICUBIC).save(
            tmp_path / "frames" / f"{number:03}.png"
        )

    def run(name: str, *options: object) -> tuple[str, float]:
        table = tmp_path / name
        given = ("--model", "embedded", "--images", tmp_path / "frames", "--out", table, "--method", "source", *options)
        result = invoke(adapt, *given, "--no-guard")
        assert result.exit_code == 0, result.output
        predicted = [line.split(",")[2] for line in table.read_text().splitlines()[1:]]
        return result.stderr, float(
            np.mean([each != str(label) for each, label in zip(predicted, labels, strict=False)])
        )

    notice, error = run("large.csv")
    resized, fewer = run("resized.csv", "--size", 32, 32)
    assert "give --size 32 32" in notice and "--size" not in resized and fewer < error - 0.3
    with pytest.raises(ctta.ConfigError, match="--size 32 32"):
        ctta.certify(ctta.models.embedded(), tmp_path / "frames", limit=16)


def test_the_default_is_measured_however_short_the_time_is() -> None:
    images, _ = read_sample()
    net = ctta.models.embedded()
    given: dict[str, Any] = {"corruptions": ["gaussian_noise"], "severity": 5, "limit": 128, "batch_size": 16}
    for options, name in (({"quick": True}, "vane"), ({"budget": 1e-3}, "vane_fast")):
        advice = ctta.advise(net, images, methods=["tent"], **given, **options)
        assert advice.race.default is not None and advice.race.default.candidate.method == name
        assert advice.recommended is not advice.race.source
        drift = ctta.data.streams.continual(
            ctta.data.datasets.sample(), names=("gaussian_noise",), limit=200, batch_size=20
        )
        errors = [ctta.evaluate(model, drift).error for model in (advice.build(), ctta.Source(net))]
        assert errors[0] < errors[1]  # by labels that the advice had not


def make_row(method: str, errors: list[int], **settings: float) -> RaceRow:
    result = make_result([errors])
    return RaceRow(Candidate(method, settings), result, None, 0)


@pytest.mark.parametrize(("held_back", "is_taken"), [([9, 8, 9, 8, 9], False), ([1, 2, 1, 2, 1], True)])
def test_a_setting_has_to_be_better_on_images_that_are_held_back(
    monkeypatch: pytest.MonkeyPatch, held_back: list[int], is_taken: bool
) -> None:
    net, (images, _) = ctta.models.embedded(), read_sample()
    labeled = label_images(net, CleanImages(images[:40], None))
    chosen = make_row("cotta", [5, 6, 5, 6, 5])

    class Played:
        """A race whose results are written above: every variant is better on the images of the final."""

        def __init__(self) -> None:
            self.probes = {"cotta": None}
            self.net, self.streams = net, ImageStreams(labeled)
            self.settings = RaceSettings((("none", 0.0),), 10, "shuffled", 60.0)
            self.progress = WorkProgress(None)

        def seconds(self, candidate: Candidate, num_images: int) -> float:
            return 1.0

        def run_round(
            self, candidates: list[Candidate], limit: int, name: str, streams: object = None
        ) -> list[RaceRow]:
            if name == "held-back":
                assert candidates[0].settings == {} and "threshold" in candidates[1].settings
                return [make_row("source", [9] * 5), chosen, make_row("cotta", held_back, **candidates[1].settings)]
            errors = [[1, 2, 1, 2, 1] if "threshold" in each.settings else [5, 6, 5, 6, 5] for each in candidates]
            rows = zip(candidates, errors, strict=True)
            return [chosen, *(make_row("cotta", found, **each.settings) for each, found in rows)]

    found = _refine(Played(), chosen, 20, labeled.select(slice(20, None)))  # type: ignore[arg-type]
    assert [list(row.candidate.settings) for row in found] == ([["threshold"]] if is_taken else [])


@pytest.mark.parametrize(
    ("drift", "clean", "has_labels", "expected"),
    [
        ([29, 31, 29, 31, 28], [5, 6, 5, 6, 5], True, "vane"),  # less error, within noise
        ([31, 30, 31, 30, 30], [5, 6, 5, 6, 5], True, "vane"),  # more, within noise
        ([36, 35, 36, 35, 36], [5, 6, 5, 6, 5], True, "source"),
        ([28, 31, 29, 31, 28], [7, 8, 7, 8, 7], True, "source"),  # harmful on clean images
        ([28, 31, 29, 31, 28], [7, 8, 7, 8, 7], False, "vane"),  # where Source has no error by definition
    ],
)
def test_source_is_recommended_only_if_the_default_has_lost(
    drift: list[int], clean: list[int], has_labels: bool, expected: str
) -> None:
    source, default = (
        RaceRow(Candidate(name), make_result(wrong), None, 0)
        for name, wrong in (("source", [[30] * 5, [5, 6, 5, 6, 5]]), ("vane", [drift, clean]))
    )
    race = Race(source, [default], [], {}, 1, 1, has_labels)
    assert race.choose().candidate.method == expected
    assert race.choose(max_cost=0.5) is source  # whatever the default has gained


def test_ties_are_no_wins_and_numbers_agree() -> None:
    source, tied = make_row("source", [5, 6, 5, 6, 5]), make_row("vane", [6, 5, 6, 5, 5])
    race = Race(source, [tied], [], {}, 1, 1)
    assert tied.points_below(source) == 0 and race.default is tied and race.choose() is tied
    results = [("VANE", [tied.result]), ("Source", [source.result]), ("TENT", [make_row("tent", [9] * 5).result])]
    sentence = write_headline(ERROR, results, ("one run", "one run each", "one run each"))
    assert sentence.startswith("VANE and Source have the lowest mean error, both ") and "0.0 points" not in sentence
    assert [format_percent(each) for each in (0.6375, 51 / 80, sum([0.6375] * 3) / 3)] == ["63.8 %"] * 3
    assert subtract_printed(0.6375, 0.1) == 53.8


def test_certify_looks_at_the_normalization_first(tmp_path: Path) -> None:
    images, _ = read_sample()
    net = train_group_norm()
    torch.save(net, tmp_path / "net.pt")
    code = f"import torch\n\ndef net():\n    return torch.load({str(tmp_path / 'net.pt')!r}, weights_only=False)\n"
    (tmp_path / "net.py").write_text(code)
    np.savez(tmp_path / "clean.npz", images=images[1500:])
    given = ("--model", f"file:{tmp_path}/net.py:net", "--images", tmp_path / "clean.npz", "--out", tmp_path / "out")
    message = user_error(certify, *given, "--method", "tent")
    assert message.startswith("with [0, 1] the network has answers that say less") and "--mean " in message
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.progress").exists()  # nothing was run


def test_a_certificate_that_is_killed_at_the_end_repeats_no_cell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    images, _ = read_sample()
    net = nn.Sequential(nn.Conv2d(3, 4, 3, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 10)).eval()
    count, measured = influence_module._count_most_flips, 0
    seen: list[tuple[int, int]] = []

    def count_flips(*given: Any) -> float:
        nonlocal measured
        measured += 1
        return count(*given)

    def stop(done: int, total: int) -> None:
        seen.append((done, total))
        if measured == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(influence_module, "_count_most_flips", count_flips)
    given: dict[str, Any] = {"method": "bn_stats", "corruptions": ["fog"], "batch_sizes": [], "num_seeds": 1}
    given |= {"num_visits": 5, "batch_size": 8, "limit": 32, "folder": tmp_path, "check_normalization": False}
    with pytest.raises(KeyboardInterrupt):
        ctta.certify(net, images, **given, on_progress=stop)
    measured, number = 100, 100  # no further stop
    certificate = ctta.certify(net, images, **given, on_progress=stop)
    cells = {(each.mode, each.image) for each in certificate.influence}
    batches = 4
    assert measured - number == len(cells) * batches - 20
    assert all(done <= total for done, total in seen)


def test_the_expected_time_counts_what_a_hostile_image_costs() -> None:
    count = influence_module._count_passes
    batch, medians = influence_module.BATCH, influence_module.MEDIAN
    assert count(batch, "hostile") > 20 * count(batch, "noise") and count(medians, "hostile") == 2 * count(
        batch, "hostile"
    )


def test_progress_of_an_earlier_call_is_not_reported() -> None:
    seen: list[tuple[int, int]] = []
    progress = WorkProgress(lambda *each: seen.append(each))
    progress.plan(10)
    progress.add(4, is_new=False)
    progress.add(2)
    assert seen == [(6, 10)]
