"""The check of a distribution notices what is too large, missing or foreign."""

import importlib.util
import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("check_distribution", ROOT / "scripts" / "check_distribution.py")
assert _spec and _spec.loader
check_distribution = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_distribution)


def write_wheel(folder: Path, *names: str) -> Path:
    path = folder / "ctta-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name in names:
            wheel.writestr(name, b"content")
    return path


def test_a_complete_wheel(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, *check_distribution.NEEDED, "ctta-1.0.dist-info/METADATA")
    assert check_distribution.find_problems(wheel) == []


def test_what_is_wrong_with_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(tmp_path, *check_distribution.NEEDED[1:], "tests/test_a.py")
    monkeypatch.setattr(check_distribution, "BUDGETS", {".whl": 0.0001})
    assert check_distribution.find_problems(wheel) == [
        f"{wheel.name} has {wheel.stat().st_size / 1e6:.1f} MB, and the budget is 0.0001 MB",
        f"{wheel.name} lacks ctta/py.typed",
        f"{wheel.name} would install tests",
    ]


def test_an_sdist_has_the_package_below_src(tmp_path: Path) -> None:
    path = tmp_path / "ctta-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as source:
        for name in check_distribution.NEEDED:
            source.addfile(tarfile.TarInfo(f"ctta-1.0/src/{name}"), io.BytesIO())
    assert check_distribution.find_problems(path) == []


def test_needed_files_exist() -> None:
    assert [name for name in check_distribution.NEEDED if not (ROOT / "src" / name).is_file()] == []


def test_the_release_is_tried_on_every_supported_python() -> None:
    """The classifiers, the lock and both workflows name the same versions."""
    project = (ROOT / "pyproject.toml").read_text()
    versions = [f"3.{minor}" for minor in range(11, 20) if f"Python :: 3.{minor}" in project]
    listed = f"python: {json.dumps(versions)}"
    for name in ("release.yml", "test.yml"):
        assert listed in (ROOT / ".github" / "workflows" / name).read_text()
