"""``ctta advise``: facts about the network, a race of methods, a recommendation that can be used."""

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import invoke, output, user_error, write_images, write_network
from hand_made_results import make_result
from numpy.typing import NDArray
from torch import nn

import ctta
from ctta.advise import InputCheck, check_input, label_images
from ctta.advise.candidates import Candidate, list_candidates, probe
from ctta.advise.race import Race, RaceRow
from ctta.cli.advise import advise
from ctta.cli.app import app
from ctta.data.datasets import CleanImages
from ctta.models import Normalized

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FAST = ("--batch-size", 8, "--corruptions", "fog", "--severity", 5)


@cache
def draw_images() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images of three classes: dark, gray and bright, of which noise makes some alike."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 96)
    levels = np.array([90, 125, 160])[labels] + generator.normal(0, 12, 96)
    pixels = levels[:, None, None, None] + generator.normal(0, 20, (96, 16, 16, 3))
    return pixels.clip(0, 255).astype(np.uint8), labels


class Brightness(nn.Module):
    """A network that measures how bright an image is, for images normalized by a mean and a standard deviation."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3, bias=False), norm, nn.Linear(4, 3)
        images, labels = draw_images()
        x = (torch.from_numpy(images).permute(0, 3, 1, 2) / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(
            STD
        ).view(3, 1, 1)
        optimizer = torch.optim.Adam(self.parameters(), 0.05)
        for _ in range(60):
            loss = nn.functional.cross_entropy(self(x), torch.from_numpy(labels))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.conv(x)).relu().mean((2, 3)))
        return logits


def write_trained(folder: Path) -> str:
    """Save the network with BatchNorm, for normalized images, and return its name."""
    torch.save(make_network(with_batch_norm=True), folder / "trained.pt")
    code = f"import torch\n\ndef net():\n    return torch.load({str(folder / 'trained.pt')!r}, weights_only=False)\n"
    (folder / "trained.py").write_text(code)
    return f"file:{folder / 'trained.py'}:net"


def join(values: tuple[float, ...]) -> str:
    return ",".join(map(str, values))


@cache
def make_network(*, with_batch_norm: bool) -> nn.Module:
    return Brightness(nn.BatchNorm2d(4) if with_batch_norm else nn.Identity())


def check(net: nn.Module, *, with_labels: bool) -> InputCheck:
    images, labels = draw_images()
    return check_input(net, label_images(net, CleanImages(images, labels if with_labels else None)))


@pytest.mark.parametrize("with_labels", [True, False])
@pytest.mark.parametrize("with_batch_norm", [True, False])
def test_a_wrong_normalization_is_found(with_batch_norm: bool, with_labels: bool) -> None:
    net = make_network(with_batch_norm=with_batch_norm)
    right = check(Normalized(net, MEAN, STD), with_labels=with_labels)
    assert right.expected is None and "no other common normalization" in right.describe()
    bare = check(net, with_labels=with_labels)
    assert bare.expected is not None and not bare.is_wrapped
    assert "ImageNet's mean and std" in (bare.expected.name, *bare.similar)
    assert f"give {bare.expected.options}" in bare.describe()
    doubled = check(nn.Sequential(Normalized(nn.Identity(), MEAN, STD), Normalized(net, MEAN, STD)), with_labels=True)
    assert doubled.expected is not None and "normalize its input twice" in doubled.describe()


def test_advise_refuses_a_wrong_normalization_unless_told_to_go_on() -> None:
    net, (images, labels) = make_network(with_batch_norm=True), draw_images()
    with pytest.raises(ctta.ConfigError, match=r"--mean .* --std .* give --any-input"):
        ctta.advise(net, images, labels)
    arguments: dict[str, Any] = {"corruptions": ["fog"], "methods": ["bn_stats"], "batch_size": 8}
    advice = ctta.advise(net, images, labels, check_normalization=False, **arguments)
    assert advice.network.input_check.expected is not None


def test_the_race_recommends_what_is_better_and_writes_it_down(tmp_path: Path) -> None:
    net, (images, labels) = Normalized(make_network(with_batch_norm=True), MEAN, STD), draw_images()
    seen: list[tuple[int, int]] = []
    advice = ctta.advise(
        net,
        images,
        labels,
        methods=["bn_stats", "tent", "lame"],
        corruptions=["brightness"],
        severity=5,
        batch_size=16,
        folder=tmp_path / "work",
        on_progress=lambda *done: seen.append(done),
    )
    assert advice.race.source.result.errors[0] > 0.3 > advice.recommended.result.errors[0]
    assert advice.recommended.gain > 0.1 and advice.race.default is not None
    assert seen and all(0 <= done <= total for done, total in seen)
    text = repr(advice)
    label = advice.recommended.candidate.label
    for expected in ("Brightness, 0.00 M parameters, 3 classes, 1 BatchNorm2d", "scored against labels", f"* {label}"):
        assert expected in text
    names: dict[str, Any] = {"net": net, "ctta": ctta}
    exec(text.splitlines()[-1], names)
    advice.save(tmp_path / "ctta.toml")
    model = ctta.from_config(tmp_path / "ctta.toml", net)
    assert type(model) is type(names["model"]) is type(advice.build())
    assert model.hyperparameters.keys() == names["model"].hyperparameters.keys()


def test_a_killed_race_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, (images, labels) = Normalized(make_network(with_batch_norm=True), MEAN, STD), draw_images()
    arguments: dict[str, Any] = {"methods": ["tent"], "corruptions": ["fog"], "batch_size": 16}
    whole = ctta.advise(net, images, labels, folder=tmp_path / "whole", **arguments)
    steps = 0
    adapt_step = ctta.Tent.adapt_step

    def count(model: ctta.Tent, x: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 8:  # within the first round
            raise KeyboardInterrupt
        return adapt_step(model, x)

    monkeypatch.setattr(ctta.Tent, "adapt_step", count)
    with pytest.raises(KeyboardInterrupt):
        ctta.advise(net, images, labels, folder=tmp_path / "killed", **arguments)
    resumed = ctta.advise(net, images, labels, folder=tmp_path / "killed", **arguments)
    assert [row.result.errors for row in resumed.race.finalists] == [row.result.errors for row in whole.race.finalists]
    before = steps
    again = ctta.advise(net, images, labels, folder=tmp_path / "killed", **arguments)
    assert steps == before and repr(again) == repr(resumed)  # everything is read


def test_a_command_that_is_killed_resumes(tmp_path: Path) -> None:
    np.savez(tmp_path / "clean.npz", images=draw_images()[0])
    options: tuple[object, ...] = ("--model", write_network(tmp_path), "--images", tmp_path / "clean.npz", *FAST)
    options += ("--methods", "bn_stats,tent,cotta_fast", "--any-input", "--json")
    whole = json.loads(output(advise, *options, "--out", tmp_path / "whole.toml"))
    out, journal = tmp_path / "killed.toml", tmp_path / "killed.toml.progress"
    code = "from ctta.cli import main; main()"
    command = [sys.executable, "-c", code, "advise", *map(str, options), "--out", str(out)]
    for num_lines in (2, 5):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and count_lines(journal) < num_lines:
                time.sleep(0.001)
            process.kill()
        assert process.returncode == -signal.SIGKILL and not out.exists()
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    resumed = json.loads(result.stdout)
    for found in (whole, resumed):
        del found["out"]
        for row in (found["source"], *found["finalists"]):
            del row["ms_per_image"]
    assert resumed == whole and not journal.exists()


def count_lines(folder: Path) -> int:
    """Return how many lines the files of a folder have; files may vanish meanwhile."""
    total = 0
    for path in list(folder.rglob("*.jsonl")):
        with suppress(FileNotFoundError):
            total += path.read_bytes().count(b"\n")
    return total


def test_methods_that_cannot_work_are_left_out_with_a_reason() -> None:
    plain, normed = make_network(with_batch_norm=False), make_network(with_batch_norm=True)

    def reasons(net: nn.Module, order: Any = "shuffled", methods: list[str] | None = None) -> dict[str, str]:
        found = list_candidates(net, batch_size=8, order=order, methods=methods)
        return found[1]

    shuffled = reasons(normed)
    assert shuffled["rem"] == "for vision transformers only" and "source-stats" in shuffled["eata"]
    assert shuffled["lame"] == "made for streams sorted by class" and "bn_stats" not in shuffled
    assert "lame" not in reasons(normed, "sorted") and "unlearns" in reasons(normed, "sorted")["shot_im"]
    assert reasons(plain)["bn_stats"] == "changes BatchNorm only, and there is none"
    assert reasons(plain)["tent"] == "trains norm layers, and there are none"
    assert reasons(normed, methods=["lame"]) == {}  # whoever names a method gets it
    failed = probe(Candidate("tent"), plain, [torch.rand(2, 3, 16, 16)] * 2)
    assert isinstance(failed, str) and failed


def test_costs_count_networks_optimizer_and_what_the_backward_pass_keeps() -> None:
    net, batches = make_network(with_batch_norm=True), [torch.rand(8, 3, 16, 16)] * 2
    costs = {name: probe(Candidate(name), net, batches) for name in ("source", "tent", "cotta_fast")}
    memory = {name: each.memory for name, each in costs.items() if not isinstance(each, str)}
    assert memory["source"] == sum(tensor.nbytes for tensor in (*net.parameters(), *net.buffers()))
    kept = 8 * 4 * 14 * 14 * 4  # the output of the convolution, an input of BatchNorm
    assert memory["source"] + kept < memory["tent"] < memory["source"] + 6 * kept
    assert memory["cotta_fast"] > memory["tent"]


def make_row(method: str, errors: list[int], milliseconds: float) -> RaceRow:
    result = make_result([errors])
    batches = tuple(replace(batch, seconds=milliseconds / 10) for batch in result.batches)
    return RaceRow(Candidate(method), replace(result, batches=batches), None, 0)


def test_the_cheapest_that_none_significantly_beats_is_chosen() -> None:
    noise = [0, 1, 2, 1, 0, 2, 1, 0, 1, 2]

    def choose(source: int, cheap: int, costly: int, max_cost: float | None = None) -> str:
        rows = [
            make_row(name, [level + each for each in noise[shift:] + noise[:shift]], milliseconds)
            for shift, (name, level, milliseconds) in enumerate(
                [("source", source, 1.0), ("bn_stats", cheap, 1.1), ("tent", costly, 3.0)]
            )
        ]
        return Race(rows[0], rows[1:], [], {}, 1, 1).choose(max_cost=max_cost).candidate.method

    assert choose(20, 20, 20) == "source"
    assert choose(20, 10, 10) == "bn_stats"
    assert choose(20, 10, 2) == "tent"
    assert choose(20, 10, 2, max_cost=2) == "bn_stats"
    assert choose(20, 30, 30) == "source"


def test_the_command_writes_a_file_that_names_the_network(tmp_path: Path) -> None:
    images, _ = draw_images()
    np.savez(tmp_path / "clean.npz", images=images)
    out = tmp_path / "mine.toml"
    model = ("--model", write_trained(tmp_path), "--mean", join(MEAN), "--std", join(STD))
    arguments = (*model, "--images", tmp_path / "clean.npz", "--out", out, *FAST)
    text = output(advise, *arguments, "--methods", "bn_stats")
    assert "own answers on the clean images" in text and f"ctta adapt --config {out}" in text
    assert not (tmp_path / "mine.toml.progress").exists()
    assert 'model = "file:trained.py:net"' in out.read_text() and ctta.from_config(out).num_steps == 0
    found = json.loads(output(advise, *arguments, "--methods", "bn_stats", "--json"))
    assert found["recommended"] in ("source", "bn_stats", "vane")
    assert {row["method"] for row in found["finalists"]} >= {"bn_stats", "vane"}


def test_quick_tries_a_few_methods_at_their_published_settings(tmp_path: Path) -> None:
    write_images(tmp_path / "images", range(40))
    out = ("--out", tmp_path / "ctta.toml")
    common = ("--model", write_network(tmp_path), "--images", tmp_path / "images", *FAST, *out, "--quick")
    text = output(advise, *common, "--methods", "bn_stats", "--any-input")
    for expected in ("Source", "BN Stats Adapt", "VANE", "fog 5"):
        assert expected in text
    assert "Dropped" not in text
    assert text.startswith("WARNING: ") and "ctta.adapt(" not in text and "ctta.toml, for the network as it is" in text
    found = json.loads(output(advise, *common, "--any-input", "--json"))
    assert {row["method"] for row in found["finalists"]} == {"bn_stats", "tent", "cotta_fast", "vane"}
    assert all(row["settings"] == {} for row in found["finalists"]) and found["dropped"] == []
    assert found["images"] == 40 and ctta.from_config(tmp_path / "ctta.toml").num_steps == 0
    assert "with [0, 1] the network" in user_error(advise, *common)  # it is not trained


def test_user_errors_are_one_line(tmp_path: Path) -> None:
    model = write_network(tmp_path)
    assert "does not exist" in user_error(advise, "--model", model, "--images", tmp_path / "nowhere")
    write_images(tmp_path / "few", range(3))
    assert "too few to judge" in user_error(advise, "--model", model, "--images", tmp_path / "few")
    write_images(tmp_path / "images", range(16))
    common = ("--model", model, "--images", tmp_path / "images")
    assert "the images have no labels" in user_error(advise, *common, "--labels")
    assert "there is no method" in user_error(advise, *common, "--methods", "tnet")
    assert "unknown corruption" in user_error(advise, *common, "--corruptions", "fgo")
    dense = ("--model", write_network(tmp_path, "dense"), "--images", tmp_path / "images")
    assert "expected logits of shape (N, classes)" in user_error(advise, *dense)
    assert "part of 'ctta advise' now" in user_error(app, "calibrate", "--model", "embedded")
    assert "ctta advise --quick" in user_error(app, "try", "--model", "embedded")


def test_folders_count_as_classes_only_if_there_are_as_many(tmp_path: Path) -> None:
    net = ctta.models.load(write_network(tmp_path))

    def has_labels(num_folders: int) -> bool:
        clean = CleanImages(np.zeros((10, 16, 16, 3), np.uint8), np.arange(10) % num_folders, num_folders)
        return label_images(net, clean).has_labels

    assert [has_labels(number) for number in (1, 4, 5)] == [False, False, True]
    outside = CleanImages(np.zeros((10, 16, 16, 3), np.uint8), np.arange(10))
    with pytest.raises(ctta.DataError):
        label_images(net, outside)


def test_ctrl_c_says_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ctta.cli.advise.run_advise", stop)
    result = invoke(advise, "--model", write_network(tmp_path), "--images", tmp_path)
    assert result.exit_code == 130 and "Run the same command again to resume." in result.stderr
