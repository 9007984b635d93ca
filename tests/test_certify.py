"""``ctta certify``: a method that harms fails, one that does nothing passes, and the page says what was tested."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import invoke, user_error, write_network
from torch import nn

import ctta
from ctta.advise import ScenarioOutcome, label_images, measure_influence
from ctta.advise.influence import count_images, use_median_
from ctta.cli.advise import certify
from ctta.data.datasets import CleanImages
from ctta.evaluation import Interval

HARMFUL = """
import ctta, torch

class Harmful(ctta.AdaptiveModel):
    def __init__(self, net, *, seed=0, patience=4):
        super().__init__(net, batch_stats=0, seed=seed)
        self.patience = patience

    def adapt_step(self, x):
        logits = self.source(x)
        return logits.flip(1) if self.num_steps >= self.patience else logits
"""
SCENARIOS = [
    *("clean images", "corruptions", "batches of 4", "sorted by class", "5 visits", "foreign images"),
]
FAST = ("--batch-size", 8, "--batch-sizes", "4", "--corruptions", "fog", "--visits", 5, "--seeds", 2, "--limit", 40)


@pytest.fixture
def arguments(tmp_path: Path) -> tuple[object, ...]:
    images = np.random.default_rng(0).integers(0, 256, (64, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "clean.npz", images=images)
    (tmp_path / "harmful.py").write_text(HARMFUL)
    common = ("--model", write_network(tmp_path), "--images", tmp_path / "clean.npz", "--out", tmp_path / "out")
    return (*common, *FAST, "--any-input")  # the network is not trained


def test_a_method_that_harms_fails_and_the_page_says_where(arguments: tuple[object, ...], tmp_path: Path) -> None:
    result = invoke(certify, *arguments, "--method", f"file:{tmp_path}/harmful.py:Harmful", "--no-guard")
    assert result.exit_code == 1 and "FAIL: " in result.stdout
    found = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert [each["name"] for each in found["scenarios"]] == SCENARIOS and not found["passed"]
    outcomes = {each["name"]: each["outcome"] for each in found["scenarios"]}
    assert outcomes["corruptions"] == outcomes["5 visits"] == "fail"
    page = (tmp_path / "out" / "certificate.html").read_text()
    assert "FAIL: Harmful" in page and "20 % of noise" in page and "hostile" in page


def test_what_changes_no_answer_passes(arguments: tuple[object, ...], tmp_path: Path) -> None:
    harmless = ("--method", f"file:{tmp_path}/harmful.py:Harmful", "--set", "patience=10000", "--no-guard")
    result = invoke(certify, *arguments, *harmless, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["passed"] and found["verdict"].startswith("PASS: Harmful patience=10000")
    assert all(each["difference"]["high"] == 0 for each in found["scenarios"])


def test_the_worst_seed_counts(arguments: tuple[object, ...], tmp_path: Path) -> None:
    (tmp_path / "seeded.py").write_text(
        HARMFUL.replace("self.patience = patience", "self.patience = 4 if seed else 999")
    )
    seeded = ("--method", f"file:{tmp_path}/seeded.py:Harmful", "--no-guard")
    codes = [invoke(certify, *arguments, *seeded, "--seeds", seeds).exit_code for seeds in (1, 2)]
    assert codes == [0, 1]


COUNTING = """
import os, signal
import ctta

class Counting(ctta.Source):
    def adapt_step(self, x):
        with open(os.environ["COUNT_IN"], "a") as file:
            file.write("x")
            if file.tell() == int(os.environ.get("KILL_AT", 0)):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().adapt_step(x)
"""


def test_a_killed_certificate_goes_on(
    arguments: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "counting.py").write_text(COUNTING)
    given = [str(each) for each in (*arguments, "--method", f"file:{tmp_path}/counting.py:Counting", "--no-guard")]

    def count_steps(name: str) -> int:
        return len((tmp_path / name).read_text())

    monkeypatch.setenv("COUNT_IN", str(tmp_path / "whole"))
    whole = json.loads(invoke(certify, *given, "--json").stdout)
    number = count_steps("whole")
    monkeypatch.setenv("COUNT_IN", str(tmp_path / "killed"))
    command = [sys.executable, "-m", "ctta", "certify", *given]
    # Results with another number of threads than that of the tests may differ, and are not read.
    threads, path = str(torch.get_num_threads()), os.pathsep.join(sys.path)
    environment = {"KILL_AT": str(number - 10), "OMP_NUM_THREADS": threads, "PYTHONPATH": path}
    ended = subprocess.run(command, env=os.environ | environment)
    assert ended.returncode == -signal.SIGKILL and (tmp_path / "out.progress").is_dir()
    monkeypatch.setenv("COUNT_IN", str(tmp_path / "rest"))
    resumed = json.loads(invoke(certify, *given, "--json").stdout)
    assert resumed["scenarios"] == whole["scenarios"] and resumed["influence"] == whole["influence"]
    assert 10 <= count_steps("rest") < number / 2  # what was complete is read
    assert not (tmp_path / "out.progress").exists()


def test_another_version_of_a_method_does_not_go_on(
    arguments: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.rmtree", lambda *given, **options: None)  # as if it had been killed at the very end
    method = ("--method", f"file:{tmp_path}/harmful.py:Harmful", "--no-guard", "--json")
    assert not json.loads(invoke(certify, *arguments, *method).stdout)["passed"]
    (tmp_path / "harmful.py").write_text(HARMFUL.replace("logits.flip(1)", "logits + 0 * logits"))
    assert json.loads(invoke(certify, *arguments, *method).stdout)["passed"]


def test_outcomes() -> None:
    scenario = ScenarioOutcome("clean", "", 0.2, 0.2, None, 3, tolerance=0.02)

    def outcome(low: float, high: float) -> str:
        return replace(scenario, difference=Interval((low + high) / 2, low, high, 5)).outcome

    assert scenario.outcome == "unclear"
    assert outcome(-0.1, 0.02) == outcome(0.005, 0.015) == "pass"
    assert outcome(-0.01, 0.03) == "unclear" and outcome(0.01, 0.03) == "fail"


def test_one_image_changes_other_answers_by_batch_statistics_only() -> None:
    torch.manual_seed(0)
    layers: list[Any] = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10)]
    net = nn.Sequential(*layers).eval()
    images = np.random.default_rng(0).integers(90, 150, (32, 16, 16, 3), dtype=np.uint8)
    labeled = label_images(net, CleanImages(images, None))
    rows = {(row.mode, row.image): row for row in measure_influence(net, labeled, batch_size=8)}
    assert len(rows) == 18 and rows["batch statistics", "hostile"].batch_size == 8
    flipped = {key: row.flipped for key, row in rows.items()}
    assert all(flipped["the source's statistics", kind] == 0 for kind in ("noise", "white", "hostile"))
    assert flipped["batch statistics", "hostile"] >= flipped["batch statistics", "noise"] > 0
    for remedy in ("a tenth of the batch", "batch statistics over four batches", "the median over images"):
        assert flipped["batch statistics", "hostile"] > flipped[remedy, "hostile"]
    assert measure_influence(nn.Sequential(nn.Flatten(), nn.Linear(768, 10)), labeled, batch_size=8) == []
    assert measure_influence(net, labeled, batch_size=1) == []
    costs: dict[str, int] = {}

    def run_cell(name: str, num_images: int, measure: Callable[[], float]) -> float:
        costs[name] = num_images
        return measure()

    few = measure_influence(net, labeled, batch_size=16, run_cell=run_cell)
    assert len(costs) == 30 and sum(costs.values()) == count_images(net, 32, 16)  # too few batches for a window of four
    assert measure_influence(net, labeled, batch_size=100)[0].batch_size == 32  # fewer images than a batch has
    assert len(few) == 15 and "batch statistics over four batches" not in {row.mode for row in few}


def test_medians_ignore_one_image_and_are_what_the_layer_expects() -> None:
    norm = nn.BatchNorm2d(2).eval()
    norm.running_mean, norm.running_var = torch.tensor([1.0, -1.0]), torch.tensor([4.0, 0.25])
    use_median_(norm)
    x = torch.randn(9, 2, 8, 8, generator=torch.Generator().manual_seed(0)) * 3 + 5
    changed = x.clone()
    changed[0] = 1e6
    for found in (norm(x), norm(changed)[1:]):
        assert found.mean((0, 2, 3)).abs().max() < 0.3 and (found.std((0, 2, 3)) - 1).abs().max() < 0.3


def test_an_attack_on_medians_has_gradients_of_every_image() -> None:
    norm = nn.BatchNorm2d(2).eval()
    use_median_(norm)
    x = torch.randn(9, 2, 8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (gradient,) = torch.autograd.grad(norm(x)[1:].square().sum(), x)
    assert (gradient[0].abs().sum((1, 2)) > 0).all()  # through the statistics alone


def test_user_errors(arguments: tuple[object, ...]) -> None:
    assert "Source is what methods are compared with" in user_error(certify, *arguments, "--method", "source")
    assert "there is no method" in user_error(certify, *arguments, "--method", "tnet")
    assert invoke(certify, *arguments).exit_code == 2


def test_python() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 3)).eval()
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    sizes: dict[str, Any] = {"batch_size": 8, "batch_sizes": [4], "num_seeds": 1, "num_visits": 5}
    given: dict[str, Any] = {"method": "tent", "settings": {"lr": 1e-5}, "check_normalization": False}
    certificate = ctta.certify(net, images, corruptions=["fog"], **given, **sizes)
    assert isinstance(certificate, ctta.Certificate) and certificate.guarded and len(certificate.scenarios) == 6
    assert "TENT lr=1e-05 (guarded)" in repr(certificate)
