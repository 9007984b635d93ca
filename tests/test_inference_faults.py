"""``ctta adapt`` on a disk that is full, in a folder whose images vanish, and with names that CSV must quote."""

import csv
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import output, user_error, write_images, write_network
from small_disk import fill, make_space, mounted_disk
from torch import nn

import ctta
from ctta import models
from ctta.adapt import InferenceSummary, adapt_folder
from ctta.adapt import folder as adapt_folder_module
from ctta.adapt import run as adapt_run
from ctta.adapt.predictions import PredictionFile
from ctta.cli.adapt import adapt
from ctta.data.datasets.image_files import find_images
from ctta.errors import ConfigError, DataError

NUM_IMAGES, BATCH_SIZE = 20, 4
SETTINGS: dict[str, Any] = {"method": "tent", "batch_size": BATCH_SIZE}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Return a folder of images, whose names are so long that the table takes more than a page of a disk."""
    folder = tmp_path / "camera"
    for path in write_images(folder, range(NUM_IMAGES)):
        path.rename(path.with_stem(f"{path.stem}-{'x' * 220}"))
    return folder


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_disk(tmp_path / "disk", 1 << 20) as path:
        yield path


def run(images: Path, table: Path, state: Path | None = None, **options: Any) -> InferenceSummary:
    net = models.load(write_network(images.parent))
    return adapt_folder(net, images, table, state=state, **SETTINGS, **options)


def uninterrupted(images: Path, **options: Any) -> bytes:
    table = images.parent / "uninterrupted.csv"
    run(images, table, **options)
    return table.read_bytes()


def after(num_images: int, action: Callable[[], object]) -> Callable[[int, int], None]:
    """Return a progress function that does something once so many images are processed."""

    def on_progress(num_done: int, total: int) -> None:
        if num_done == num_images:
            action()

    return on_progress


def read_rows(table: Path) -> list[list[str]]:
    with table.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.reader(file))[1:]


# A full disk


@pytest.mark.parametrize("seconds_between_saves", [0.0, 20.0], ids=["state", "rows"])
def test_a_disk_that_fills_up(
    images: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, seconds_between_saves: float
) -> None:
    """With a save after each batch it is the state that finds no space, otherwise the rows."""
    expected = uninterrupted(images)
    table, state = disk / "table.csv", disk / "state.safetensors"
    monkeypatch.setattr(adapt_run, "SECONDS_BETWEEN_SAVES", seconds_between_saves)
    with pytest.raises(OSError, match=r"free some space and run again to resume from the last") as raised:
        run(images, table, state, on_progress=after(12, lambda: fill(disk)))
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename == str(table if seconds_between_saves else state)
    assert table.read_bytes() == expected[: table.stat().st_size]
    assert len(read_rows(table)) == 16
    assert {path.name for path in disk.iterdir()} == {
        "table.csv",
        "table.csv.lock",
        "state.safetensors",
        "state.safetensors.json",
        "state.safetensors.lock",
        "filler",
    }
    model = ctta.load(state, models.load(write_network(images.parent)))
    assert model.num_steps == (0 if seconds_between_saves else 3)
    make_space(disk)
    summary = run(images, table, state)
    assert summary.num_dropped == 16 - BATCH_SIZE * model.num_steps
    assert table.read_bytes() == expected


def test_the_command_reports_a_full_disk_in_one_sentence(images: Path, disk: Path) -> None:
    expected = uninterrupted(images)
    table, state = disk / "table.csv", disk / "state.safetensors"
    fill(
        disk, num_free_pages=4
    )  # for the state of a new stream, its size and the table, not for another state beside it
    options = ["--images", images, "--out", table, "--state", state, "--method", "tent", "--batch-size", BATCH_SIZE]
    command = [sys.executable, "-m", "ctta", "adapt", "--model", write_network(images.parent), *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert "No space left on device: free some space and run again" in line and str(disk) in line
    make_space(disk)
    assert "20 rows" in output(adapt, *command[4:])
    assert table.read_bytes() == expected


def test_a_full_disk_is_an_os_error_of_save_and_the_old_file_stays(tmp_path: Path) -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 40_000))
    model = ctta.CoTTA(net, views=())
    with mounted_disk(tmp_path / "disk", 1 << 20) as disk:
        path = disk / "stream.safetensors"
        ctta.save(model, path)
        before = path.read_bytes()
        fill(disk)
        model(torch.randn(8, 4))
        with pytest.raises(OSError, match="No space left on device") as raised:
            ctta.save(model, path)
        assert raised.value.errno == errno.ENOSPC
        assert path.read_bytes() == before
        assert not list(disk.glob(".*"))


# Images that vanish


def test_an_image_that_vanishes_is_skipped_and_processed_when_it_is_back(images: Path, tmp_path: Path) -> None:
    table, state = tmp_path / "table.csv", tmp_path / "state.safetensors"
    paths = sorted(images.iterdir())
    content = paths[17].read_bytes()
    summary = run(images, table, state, on_progress=after(4, paths[17].unlink))
    assert (summary.num_images, summary.num_vanished) == (19, 1)
    assert [row[0] for row in read_rows(table)] == [path.name for path in paths if path != paths[17]]
    without = tmp_path / "without.csv"
    assert run(images, without).num_vanished == 0
    assert table.read_bytes() == without.read_bytes()
    paths[17].write_bytes(content)
    assert run(images, table, state).num_images == 1
    assert [row[:2] for row in read_rows(table)[19:]] == [[paths[17].name, "5"]]


def test_a_whole_batch_that_vanishes_is_no_step(images: Path, tmp_path: Path) -> None:
    table, state = tmp_path / "table.csv", tmp_path / "state.safetensors"
    paths = sorted(images.iterdir())

    def delete() -> None:
        for path in paths[12:16]:
            path.unlink()

    seen: list[int] = []

    def on_progress(num_done: int, total: int) -> None:
        seen.append(num_done)
        if num_done == 4:
            delete()

    summary = run(images, table, state, on_progress=on_progress)
    assert (summary.num_images, summary.num_vanished) == (16, 4)
    assert seen == [4, 8, 12, 16, 20]
    assert [row[1] for row in read_rows(table)] == [str(step) for step in range(4) for _ in range(4)]


def test_vanished_images_are_in_the_summary(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are listed before the folder is emptied."""

    def list_and_delete(root: Path) -> list[Path]:
        paths = find_images(root)
        for path in paths[2:4]:
            path.unlink()
        return paths

    monkeypatch.setattr(adapt_folder_module, "find_images", list_and_delete)
    options = ["--model", write_network(tmp_path), "--images", images, "--out", tmp_path / "a.csv", "--method", "tent"]
    text = output(adapt, *options)
    assert "18 of them new.\n2 images were skipped because they were deleted before they were read." in text


def test_two_runs_do_not_write_the_same_table(images: Path, tmp_path: Path) -> None:
    table = tmp_path / "predictions.csv"

    def run_again() -> None:
        with pytest.raises(ConfigError, match=r"predictions\.csv is in use by another process"):
            run(images, table)

    run(images, table, on_progress=after(BATCH_SIZE, run_again))
    assert table.read_bytes() == uninterrupted(images)


def test_a_broken_image_ends_a_strict_run(images: Path, tmp_path: Path) -> None:
    paths = sorted(images.iterdir())
    paths[17].write_bytes(b"no image")

    with pytest.raises(DataError):
        run(images, tmp_path / "table.csv", on_progress=after(4, paths[18].unlink), strict=True)


# Names that must be quoted or escaped

NAMES = [
    "a\rb.png",
    "c\nd.png",
    "e\r\nf.png",
    'g"h,i.png',
    "\rj.png",
    "\tk.png",
    "=1+1.png",
    "'=2.png",
    "''@3.png",
    "+4.png",
    "-5.png",
    "@6.png",
    "it's.png",
    os.fsdecode(b"\xff.png"),
]


@pytest.fixture
def odd_images(tmp_path: Path) -> Path:
    folder = tmp_path / "odd"
    for path, name in zip(write_images(folder, range(len(NAMES))), NAMES, strict=True):
        path.rename(path.with_name(name))
    return folder


@pytest.mark.parametrize("escape_formulas", [False, True])
def test_odd_names_are_quoted_and_resumed(odd_images: Path, tmp_path: Path, escape_formulas: bool) -> None:
    expected = uninterrupted(odd_images, escape_formulas=escape_formulas)
    rows = read_rows(tmp_path / "uninterrupted.csv")
    assert len(rows) == len(NAMES)
    if escape_formulas:
        assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for row in rows for cell in row)
        assert {row[0] for row in rows} >= {"'=1+1.png", "''=2.png", "'''@3.png", "'-5.png", "it's.png"}
    else:
        assert {row[0] for row in rows} == set(NAMES)
    table, state = tmp_path / "table.csv", tmp_path / "state.safetensors"

    def interrupt() -> None:
        raise KeyboardInterrupt

    for num_done in (4, 8, 12):
        with pytest.raises(KeyboardInterrupt):
            run(odd_images, table, state, on_progress=after(num_done, interrupt), escape_formulas=escape_formulas)
    assert run(odd_images, table, state, escape_formulas=escape_formulas).num_images == 2
    assert table.read_bytes() == expected
    assert run(odd_images, table, state, escape_formulas=escape_formulas).num_images == 0
    with pytest.raises(ConfigError):
        run(odd_images, table, state, escape_formulas=not escape_formulas)


def test_the_option_of_the_command(odd_images: Path, tmp_path: Path) -> None:
    options = ["--model", write_network(tmp_path), "--images", odd_images, "--method", "tent", "--batch-size", 4]
    output(adapt, *options, "--out", tmp_path / "table.csv", "--escape-formulas")
    assert (tmp_path / "table.csv").read_bytes() == uninterrupted(odd_images, escape_formulas=True)
    assert "exists but no state was given" in user_error(adapt, *options, "--out", tmp_path / "table.csv")


def test_a_table_that_is_cut_anywhere_keeps_its_whole_rows(tmp_path: Path) -> None:
    file = PredictionFile(tmp_path / "table.csv", ["class"])
    file.create()
    header = len(file.path.read_bytes())
    ends = [header]
    for step, name in enumerate(NAMES):
        file.append([[name, step, 7]])
        ends.append(file.path.stat().st_size)
    whole = file.path.read_bytes()
    for length in range(header, len(whole) + 1):
        file.path.write_bytes(whole[:length])
        num_whole = sum(end <= length for end in ends) - 1
        assert file.truncate(len(NAMES)) == (set(NAMES[:num_whole]), 0)
        assert file.path.read_bytes() == whole[: ends[num_whole]]
