"""The scripts of a release: the check of a distribution, and the lock of the dependencies."""

import io
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from scripts import check_distribution, lock

ROOT = Path(__file__).parent.parent


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


TEXTS = tuple((ROOT / name).read_text() for name in ("requirements.lock", "constraints.txt", "pyproject.toml"))

#: One line for each package of the lock, without the comment at the top.
BLOCKS = TEXTS[0].partition("\n")[2].replace("\\\n", " ").splitlines()


def find_problems_after(index: int, old: str, new: str) -> list[str]:
    """Return the problems after replacing a text in one of the three files."""
    assert old in TEXTS[index]
    texts = [text.replace(old, new, 1) if number == index else text for number, text in enumerate(TEXTS)]
    problems: list[str] = lock.find_problems(*texts)
    return problems


def test_the_files_agree() -> None:
    assert lock.find_problems(*TEXTS) == []
    subprocess.run([sys.executable, ROOT / "scripts" / "lock.py", "--check"], check=True)


@pytest.mark.parametrize(
    ("index", "old", "new", "problem"),
    [
        (0, "\nrich==", "\nrich==9", "in constraints.txt, 9"),
        (0, "\nrich==", "\nrick==", "rich: "),
        (1, "\nrich==", "\nrich==9", "rich: 9"),
        (1, "\nrich==", "\n#", "rich: missing in constraints.txt"),
        (1, "\nrich==", "\nleft-pad==1.0\nrich==", "left-pad: 1.0 in constraints.txt, missing in the lock"),
        (2, '"rich>=13.7"', '"rich>=9999"', "but pyproject.toml needs rich>=9999"),
        (2, '"rich>=13.7"', '"left-pad"', "left-pad: missing in the lock"),
        (2, '"hatchling==', '"hatchling>=', "build-system: hatchling>="),
    ],
)
def test_a_difference_is_reported(index: int, old: str, new: str, problem: str) -> None:
    problems = find_problems_after(index, old, new)
    assert any(problem in each for each in problems), problems


def test_every_package_but_torch_has_a_hash() -> None:
    assert len(BLOCKS) > 100
    assert all("--hash=sha256:" in block for block in BLOCKS)
    name = BLOCKS[0].partition("==")[0]
    assert find_problems_after(0, BLOCKS[0].partition("--hash")[2].split()[0], "") == [f"{name}: no hash"]
    assert "torch" in lock.parse_pins(TEXTS[1]) and "torch" not in lock.parse_pins(TEXTS[0])


def test_pip_refuses_a_package_with_another_hash(tmp_path: Path) -> None:
    """A package of the same name and version with other content, as an index that was broken into would offer."""
    with zipfile.ZipFile(tmp_path / "mdurl-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("mdurl-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: mdurl\nVersion: 0.1.2\n")
        wheel.writestr("mdurl-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("mdurl-0.1.2.dist-info/RECORD", "")
    requirements = tmp_path / "requirements.lock"
    requirements.write_text(next(block for block in BLOCKS if block.startswith("mdurl==0.1.2 ")))
    offline = ["--isolated", "--no-index", "--find-links", str(tmp_path), "--no-deps", "--no-cache-dir"]
    command = [sys.executable, "-m", "pip", "download", *offline, "--dest", str(tmp_path / "out"), "--require-hashes"]
    ended = subprocess.run([*command, "--requirement", requirements], capture_output=True, text=True)
    assert ended.returncode != 0 and "DO NOT MATCH THE HASHES" in ended.stderr
