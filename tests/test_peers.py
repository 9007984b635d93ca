"""benchmarks/speed/peers.py: another implementation beside ours, here a small one of TENT that each test writes."""

from pathlib import Path

import pytest
import torch

from benchmarks.speed.peers import find_class, find_file, run
from ctta.errors import ConfigError
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


def test_errors_say_what_to_do(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no Python file"):
        find_file(folder / "elsewhere")
    (folder / "second.py").write_text(PEER)
    with pytest.raises(ConfigError, match=r"peer.py, second.py; choose one with --file"):
        find_file(folder)
    assert find_file(folder, "second.py").name == "second.py"
    with pytest.raises(ConfigError, match="takes an optimizer, found none"):
        find_class(import_python_file(folder / "sizes.py"))
    with pytest.raises(ConfigError, match="no setting 'stepz'"):
        run(folder, file="peer.py", their=["stepz=2"])
