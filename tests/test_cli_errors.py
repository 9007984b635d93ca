"""How the command reports errors: one line for a user's mistake, a traceback for anything else."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import write_images, write_network

from ctta.cli import main
from ctta.errors import CheckpointError, ConfigError, DataError, InputError, is_user_error


@pytest.mark.parametrize(
    "error",
    [
        InputError(""),
        ConfigError(""),
        CheckpointError(""),
        DataError(""),
        FileNotFoundError(""),
        PermissionError(""),
        ImportError("this needs the extra 'data': pip install 'ctta[data]'"),
    ],
    ids=repr,
)
def test_user_errors(error: Exception) -> None:
    assert is_user_error(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(""),
        torch.OutOfMemoryError(""),
        ValueError(""),
        TypeError(""),
        KeyError(""),
        AssertionError(""),
        ModuleNotFoundError("No module named 'tpyer'", name="tpyer"),
    ],
    ids=repr,
)
def test_bugs(error: Exception) -> None:
    assert not is_user_error(error)


def test_a_users_mistake_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["report", str(tmp_path / "nowhere")]
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    message = exit_info.value.code
    assert isinstance(message, str) and message.startswith("ctta: ") and "\n" not in message
    monkeypatch.setenv("CTTA_TRACEBACK", "1")
    with pytest.raises(DataError):
        main(arguments)


def test_an_error_of_the_network_is_a_traceback_and_a_note(tmp_path: Path) -> None:
    write_images(tmp_path / "images", range(2), side=32)
    options = ["--model", write_network(tmp_path), "--images", tmp_path / "images", "--out", tmp_path / "table.csv"]
    command = [sys.executable, "-m", "ctta", "adapt", *map(str, options)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stdout == ""
    lines = ended.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert any(line.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied") for line in lines)
    assert lines[-1].startswith("The network failed on a batch of shape (2, 3, 32, 32): resize the images")


def test_without_the_extra_the_command_says_what_to_install() -> None:
    script = "import sys; sys.modules['typer'] = None; from ctta.cli import main; main([])"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "ctta: the command needs typer, which is not installed: pip install 'ctta[bench]'\n"
