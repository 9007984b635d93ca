"""Atomic writes: a file is complete or absent."""

import os
from pathlib import Path
from unittest import mock

import pytest

from ctta.errors import ConfigError
from ctta.io.atomic import atomic_write, parse_local_path


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("unique", [False, True])
def test_the_file_appears_when_the_block_ends(durable: bool, unique: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with atomic_write(path, durable=durable, unique=unique) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old" and temporary.parent == tmp_path
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("unique", [False, True])
def test_an_error_leaves_the_old_file_and_nothing_else(unique: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(path, unique=unique) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_fixed_temporary_name_is_reused_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "file.partial").write_text("what a killed process left behind")
    with atomic_write(tmp_path / "file", unique=False) as temporary:
        temporary.write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_permissions_are_the_default_ones(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    with atomic_write(tmp_path / "file") as temporary:
        temporary.chmod(0o600)
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_writers_with_unique_names_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with atomic_write(path) as first, atomic_write(path) as second:
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first", "the outer block ends last"


def test_a_durable_write_syncs_the_file_before_and_the_directory_after_it_is_renamed(tmp_path: Path) -> None:
    steps: list[str] = []
    replace, fsync = os.replace, os.fsync

    def traced_replace(source: Path, target: Path) -> None:
        steps.append("replace")
        replace(source, target)

    def traced_fsync(descriptor: int) -> None:
        steps.append("fsync")
        fsync(descriptor)

    with mock.patch("os.replace", traced_replace), mock.patch("os.fsync", traced_fsync):
        with atomic_write(tmp_path / "a.txt", durable=True) as temporary:
            temporary.write_text("new")
        assert steps == ["fsync", "replace", "fsync"]
        steps.clear()
        with atomic_write(tmp_path / "a.txt") as temporary:
            temporary.write_text("new")
        assert steps == ["replace"]


@pytest.mark.parametrize("path", ["streams", "/mnt/streams", "a:b/c", "C:/streams", "C:\\streams", "http"])
def test_paths_are_no_urls(path: str) -> None:
    assert parse_local_path(path) == Path(path)


@pytest.mark.parametrize("path", ["memory://streams", "s3://bucket/streams", "file:///streams", "gs+x://a"])
def test_urls_are_no_paths(path: str) -> None:
    for given in (path, Path(path)):
        with pytest.raises(ConfigError, match="mount the store as a folder"):
            parse_local_path(given)
