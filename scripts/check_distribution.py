"""Check the files in dist/ as a user would get them: size, content, and the demo in a clean environment.

    python scripts/check_distribution.py                 sizes and contents only
    python scripts/check_distribution.py --install       also install the wheel and the sdist, and run the demo
    python scripts/check_distribution.py --install --constraint constraints.txt

Run it after ``make dist``. The environment is new and empty, so a dependency that is used but not declared fails here.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: The largest wheel and sdist that are published, in MB. Weights, sample images and frost photos are most of a wheel;
#: the sdist also has the data of the tests and the pictures of the docs.
BUDGETS = {".whl": 12, ".gz": 30}
#: What a wheel without which the demo could not run, or types would not be found, must hold.
NEEDED = (
    "ctta/py.typed",
    "ctta/models/embedded.safetensors",
    "ctta/detection/streets.safetensors",
    "ctta/data/datasets/sample.npz",
    "ctta/benchmark/report/page.html",
    "ctta/benchmark/report/published.csv",
)


def main() -> None:
    """Check all files, and exit with what is wrong."""
    parser = argparse.ArgumentParser(description="Check the files in dist/.")
    parser.add_argument("--folder", type=Path, default=ROOT / "dist")
    parser.add_argument("--install", action="store_true", help="install each into a new environment, and run the demo")
    parser.add_argument("--constraint", type=Path, help="versions for the new environment")
    arguments = parser.parse_args()
    wheels, sources = list(arguments.folder.glob("*.whl")), list(arguments.folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sources) != 1:
        sys.exit(f"expected one wheel and one sdist in {arguments.folder}, found {len(wheels)} and {len(sources)}")
    files = wheels + sources
    if problems := [problem for file in files for problem in find_problems(file)]:
        sys.exit("\n".join(problems))
    for file in files:
        print_line(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB of {BUDGETS[file.suffix]}")
    if arguments.install:
        for file in files:
            run_from(file, arguments.constraint, ["demo"] if file.suffix == ".whl" else ["methods", "tent"])


def find_problems(file: Path) -> list[str]:
    """Return what is wrong with a distribution."""
    problems = []
    if (size := file.stat().st_size / 1e6) > BUDGETS[file.suffix]:
        problems.append(f"{file.name} has {size:.1f} MB, and the budget is {BUDGETS[file.suffix]} MB")
    names = list_names(file)
    prefix = "" if file.suffix == ".whl" else f"{file.name.removesuffix('.tar.gz')}/src/"
    problems += [f"{file.name} lacks {name}" for name in NEEDED if f"{prefix}{name}" not in names]
    if file.suffix == ".whl":
        foreign = {name.partition("/")[0] for name in names if not name.startswith(("ctta/", "ctta-"))}
        problems += [f"{file.name} would install {name}" for name in sorted(foreign)]
    return problems


def list_names(file: Path) -> set[str]:
    """Return the names of the members of an archive."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            return set(wheel.namelist())
    with tarfile.open(file) as source:
        return set(source.getnames())


def run_from(file: Path, constraint: Path | None, command: list[str]) -> None:
    """Install a distribution with the extra ``bench`` into a new environment, and run the doctor and a command."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        binaries = Path(folder, "Scripts" if sys.platform == "win32" else "bin")
        constraints = ["--constraint", str(constraint.resolve())] if constraint else []
        pip = [str(binaries / "python"), "-m", "pip", "install", "--quiet", *constraints]
        subprocess.run([*pip, f"{file.resolve()}[bench]"], check=True)
        for words in (["-m", "ctta", "doctor"], ["-m", "ctta", "--version"], ["-m", "ctta", *command]):
            subprocess.run([str(binaries / "python"), *words], check=True, cwd=folder)
    print_line(f"{file.name}: installed, and ctta {' '.join(command)} ran")


def print_line(text: str) -> None:
    """Print a line at once, between those of the programs that are run."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
