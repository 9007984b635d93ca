"""Run commands in-process; a small network in a file, and image files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import typer
from PIL import Image
from typer.testing import CliRunner, Result

from ctta.errors import is_user_error

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

Command = Callable[..., Any] | typer.Typer


def invoke(command: Command, *arguments: object) -> Result:
    """Run a command; an exception that it raises is in the result."""
    app = command if isinstance(command, typer.Typer) else typer.Typer(pretty_exceptions_enable=False)
    if app is not command:
        app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def output(command: Command, *arguments: object) -> str:
    """Return what a successful command prints on standard output."""
    with mock.patch("ctta.io.progress.SECONDS_BEFORE_FIRST_LINE", float("inf")):  # however slow the machine is
        result = invoke(command, *arguments)
    if result.exception:
        raise result.exception
    assert result.exit_code == 0 and result.stderr == ""  # nothing but progress goes there
    return result.stdout


def user_error(command: Command, *arguments: object) -> str:
    """Return the one line that a command reports for a user's mistake."""
    result = invoke(command, *arguments)
    assert result.exception is not None and is_user_error(result.exception), repr(result.exception)
    text = str(result.exception)
    assert text and "\n" not in text
    return text


def network_error(command: Command, *arguments: object) -> str:
    """Return the note on an error of the network, which keeps its type and its traceback."""
    error = invoke(command, *arguments).exception
    assert isinstance(error, RuntimeError) and not is_user_error(error), repr(error)
    (note,) = error.__notes__
    return note


def write_network(folder: Path, function: str = "net") -> str:
    """Write a small network for images of 16x16, and return its name."""
    (folder / "network.py").write_text(NETWORK)
    return f"file:{folder / 'network.py'}:{function}"


def write_images(folder: Path, numbers: range, *, side: int = 16) -> list[Path]:
    """Write one image per number, the same each time."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in numbers:
        paths.append(folder / f"{number:03}.png")
        pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(paths[-1])
    return paths
