"""The scripts of benchmarks/: passes of every method, another implementation beside ours, and the table of results."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.results.method_numbers import MergeError, add_errors, add_results
from benchmarks.speed.peers import find_class, find_file, run
from ctta.errors import ConfigError
from ctta.evaluation import Result
from ctta.evaluation.metrics import ImageScore
from ctta.evaluation.results import BatchRecord
from ctta.io.python_files import import_python_file

PEER = """
import torch
from torch import nn
import sizes  # of the same folder

class Tent(nn.Module):
    def __init__(self, model, optimizer, steps=1):
        super().__init__()
        self.model, self.optimizer, self.steps = model, optimizer, steps

    def forward(self, x):
        for _ in range(self.steps):
            logits = forward_and_adapt(x, self.model, self.optimizer)
        return logits

def forward_and_adapt(x, model, optimizer):
    logits = model(x)
    loss = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean() * torch.ones(sizes.ONE).cuda()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return logits

def configure_model(model):
    model.train().requires_grad_(False)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.requires_grad_(True)
            layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
    return model

def collect_params(model):
    print("noise on the terminal")
    found = [(value, name) for name, value in model.named_parameters() if value.requires_grad]
    return tuple(zip(*found))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "peer.py").write_text(PEER)
    (tmp_path / "sizes.py").write_text("ONE = 1\n")
    return tmp_path


def test_the_same_equations_give_the_same_logits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A ratio with an interval, and logits that stay alike over all batches."""
    found = run(folder, settings=["batch_stats=1.0"], batch_size=16, budget=0.0)
    assert 0 < found.times.low <= found.times.ratio <= found.times.high
    assert len(found.differences) == 4
    assert max(difference.largest for difference in found.differences) < 1e-3
    assert all(difference.agreement == 1 for difference in found.differences)
    assert capsys.readouterr().out == ""
    assert torch.zeros(1).cuda.__name__ == "cuda", "torch is as it was"


def test_another_setting_shows_in_the_logits(folder: Path) -> None:
    """Two of their steps per batch: the second answers after the first."""
    found = run(folder, their=["steps=2"], settings=["lr=0.01", "batch_stats=1.0"], batch_size=16, budget=0.0)
    assert found.differences[0].largest > 1e-2
    assert found.differences[-1].mean > found.differences[0].mean


def test_folders_and_settings_that_cannot_be_used(folder: Path) -> None:
    with pytest.raises(ConfigError):
        find_file(folder / "elsewhere")
    (folder / "second.py").write_text(PEER)
    with pytest.raises(ConfigError, match="--file"):
        find_file(folder)
    assert find_file(folder, "second.py").name == "second.py"
    with pytest.raises(ConfigError):
        find_class(import_python_file(folder / "sizes.py"))
    with pytest.raises(ConfigError):
        run(folder, file="peer.py", their=["stepz=2"])


ROOT = Path(__file__).parents[1]


def test_the_table_of_bare_passes_is_that_of_the_methods() -> None:
    """Every method has a row, and as many images go forward and back in its step as the row says."""
    command = [sys.executable, "-m", "benchmarks.speed.methods", "--check"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def make_result(seed: int, *num_wrong: int, lr: float = 0.1, name: str = "roid") -> Result:
    """Return a result with ten images per corruption, all predicted with a confidence of 0.5."""
    scores = [ImageScore(10, wrong, ((10, 5.0, 10 - wrong),)) for wrong in num_wrong]
    return Result(
        method=name.upper(),
        settings={"lr": str(lr), "seed": str(seed)},
        source="a",
        stream="s",
        stream_hash="b",
        domains=tuple(f"corruption{number} 5" for number in range(len(scores))),
        num_batches=len(scores),
        reset_at_domain=False,
        labels={"row": name, "seed": seed},
        environment={"ctta": "0.2.0"},
        batches=tuple(BatchRecord(number, score, 1.0, None) for number, score in enumerate(scores)),
    )


def test_seeds_of_several_runs_are_averaged_once() -> None:
    results = [make_result(1, 1, 3), make_result(2, 2, 6), make_result(3, 3, 3)]
    together = add_results({}, results)
    row = together["roid"]
    assert row["seeds"] == row["detailed_seeds"] == [1, 2, 3]
    assert row["error_by_seed"] == [20.0, 40.0, 30.0]
    assert row["error"] == 30 and row["deviation"] == 10
    assert row["error_by_corruption"] == {"corruption0 5": 20.0, "corruption1 5": 40.0}
    assert row["calibration_error"] == pytest.approx((30 + 10 + 20) / 3)
    one_by_one = add_results(add_results(add_results({}, results[2:]), results[:1]), results[1:2])
    assert one_by_one["roid"] | {"settings": {}} == row | {"settings": {}}
    assert add_results(one_by_one, results) == one_by_one


def test_rows_of_before_the_details_were_listed() -> None:
    row = add_results({}, [make_result(1, 1, 3)])["roid"]
    del row["detailed_seeds"]
    assert add_results({"roid": row}, [make_result(1, 1, 3)])["roid"] == row
    assert add_results({"roid": row}, [make_result(2, 3, 3)])["roid"]["error_by_corruption"]["corruption0 5"] == 20


def test_all_images_replace_a_sample_and_not_the_reverse() -> None:
    sample = add_results({}, [make_result(1, 2, 2)], limit=10)
    assert sample["roid"]["limit"] == 10
    full = add_results(sample, [make_result(1, 1, 1)])
    assert "limit" not in full["roid"] and full["roid"]["error"] == 10
    with pytest.raises(MergeError, match="all images"):
        add_results(full, [make_result(2, 1, 1)], limit=10)


def test_results_that_do_not_belong_to_a_row() -> None:
    rows = add_results({}, [make_result(1, 1, 3)])
    with pytest.raises(MergeError, match="settings"):
        add_results(rows, [make_result(2, 1, 3, lr=0.2)])
    rows["roid"] = add_errors("roid", rows["roid"], {1: 20.0, 2: 26.0})
    with pytest.raises(MergeError, match="seed 2"):
        add_results(rows, [make_result(2, 1, 3)])


def test_errors_of_seeds_without_details() -> None:
    rows = add_results({}, [make_result(1, 1, 3)])
    row = add_errors("roid", rows["roid"], {1: 20.0, 2: 26.0, 3: 23.0})
    assert (row["seeds"], row["error"], row["deviation"]) == ([1, 2, 3], 23.0, 3.0)
    assert row["detailed_seeds"] == [1] and row["error_by_corruption"] == rows["roid"]["error_by_corruption"]
    assert add_errors("roid", row, {1: 20.0, 2: 26.0, 3: 23.0}) == row
    for other in ({1: 21.0, 2: 26.0}, {2: 26.0}):
        with pytest.raises(MergeError, match="another stream"):
            add_errors("roid", rows["roid"], other)
