"""Commands called as a person would, a small network in a file, and pictures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import typer
from PIL import Image
from typer.testing import CliRunner, Result

NETWORK = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 7 * 7, 5)
    return nn.Sequential(*layers)

def other_weights():
    other = net()
    nn.init.zeros_(other[-1].bias)
    return other

def dense():
    return nn.Conv2d(3, 5, 1)
"""


def run(command: Callable[..., Any] | typer.Typer, *arguments: object) -> Result:
    """Call a command; what it raises is in the result, as `main` would turn it into a line."""
    app = command if isinstance(command, typer.Typer) else typer.Typer(pretty_exceptions_enable=False)
    if app is not command:
        app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def output(command: Callable[..., Any] | typer.Typer, *arguments: object) -> str:
    """What a command that succeeds prints on standard output."""
    result = run(command, *arguments)
    if result.exception:
        raise result.exception
    assert result.exit_code == 0 and result.stderr == ""  # nobody watches, so no progress either
    return result.stdout


def mistake(command: Callable[..., Any] | typer.Typer, *arguments: object) -> str:
    """The one line that a person's mistake ends in."""
    result = run(command, *arguments)
    assert isinstance(result.exception, (ValueError, TypeError, OSError, ImportError)), result
    text = str(result.exception)
    assert text and "\n" not in text
    return text


def network(folder: Path, function: str = "net") -> str:
    """The name of a small network for images of 16x16."""
    (folder / "network.py").write_text(NETWORK)
    return f"file:{folder / 'network.py'}:{function}"


def write_pictures(folder: Path, numbers: range, *, side: int = 16) -> list[Path]:
    """One picture for each number, the same each time."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in numbers:
        paths.append(folder / f"{number:03}.png")
        pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(paths[-1])
    return paths
