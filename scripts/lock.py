"""Write requirements.lock: every package that `make` installs but torch, with the SHA-256 of its files.

    python scripts/lock.py            resolve the extras of pyproject.toml under constraints.txt, and write the lock
    python scripts/lock.py --check    only compare the lock with constraints.txt and pyproject.toml, without a network

The hashes cover the wheels of every supported Python and system; the package index that pip is configured to use lists
them. torch is left out because its builds differ by platform and index, and so are the packages that only its CUDA
builds bring along.
"""

import json
import re
import subprocess
import sys
import tomllib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

ROOT = Path(__file__).parent.parent
LOCK, CONSTRAINTS, PROJECT = ROOT / "requirements.lock", ROOT / "constraints.txt", ROOT / "pyproject.toml"
#: What `make` needs beside the extra dev: to build an editable install and a distribution without isolation.
BUILD_TOOLS = ("build", "editables")
UNLOCKED = re.compile("torch|triton|nvidia-.*|cuda-.*")
INTERPRETERS = re.compile("py3|cp3(11|12|13)")
HEADER = """# Every package that `make` installs but torch, with the SHA-256 of its files. Written by scripts/lock.py.
"""


def main() -> None:
    """Write the lock, or check it."""
    if "--check" not in sys.argv[1:]:
        versions = resolve()
        with ThreadPoolExecutor(8) as pool:
            hashes = dict(zip(versions, pool.map(find_hashes, versions.items()), strict=True))
        LOCK.write_text(HEADER + "".join(format_entry(name, versions[name], hashes[name]) for name in sorted(versions)))
    if problems := find_problems(LOCK.read_text(), CONSTRAINTS.read_text(), PROJECT.read_text()):
        sys.exit("\n".join([*problems, "run: .venv/bin/python scripts/lock.py"]))


def resolve() -> dict[str, str]:
    """Return the version of every package that pip would install into an empty environment."""
    build_requirements = tomllib.loads(PROJECT.read_text())["build-system"]["requires"]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    wanted = [f"{ROOT}[dev]", *build_requirements, *BUILD_TOOLS]
    report = subprocess.run([*command, "--constraint", CONSTRAINTS, *wanted], check=True, stdout=subprocess.PIPE)
    found = {
        canonicalize_name(item["metadata"]["name"]): item["metadata"]["version"]
        for item in json.loads(report.stdout)["install"]
    }
    return {name: version for name, version in found.items() if name != "ctta" and not UNLOCKED.fullmatch(name)}


def find_hashes(package: tuple[str, str]) -> list[str]:
    """Return the SHA-256 of the files of a version: of its wheels, or of its source if there are none."""
    name, version = package
    with urllib.request.urlopen(f"{find_index()}/{name}/", timeout=60) as response:
        page = LinkParser()
        page.feed(response.read().decode())
    wheels, sources = [], []
    for link in page.links:
        address, fragment = urldefrag(link)
        file = unquote(urlsplit(address).path.rpartition("/")[2])
        algorithm, _, digest = fragment.partition("=")
        if algorithm != "sha256":
            continue
        if file.endswith(".whl") and f"-{version}-".lower() in file.lower():
            tags = parse_wheel_filename(file)[3]
            if any(is_supported(tag.interpreter, tag.abi, tag.platform) for tag in tags):
                wheels.append(digest)
        elif file.lower().endswith(f"-{version}.tar.gz".lower()) and str(parse_sdist_filename(file)[1]) == version:
            sources.append(digest)
    if not (hashes := wheels or sources):
        sys.exit(f"{name} {version}: the index lists no file with a SHA-256")
    return sorted(hashes)


def is_supported(interpreter: str, abi: str, platform: str) -> bool:
    """Return whether a wheel runs on a supported Python; musl and Pythons without a global lock are not."""
    if "musllinux" in platform:
        return False
    return abi == "abi3" or (bool(INTERPRETERS.fullmatch(interpreter)) and abi in ("none", interpreter))


def find_index() -> str:
    """Return the address of pip's package index."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if configured:
        return configured.rstrip("/")
    from pip._internal.models.index import PyPI

    return PyPI.simple_url


class LinkParser(HTMLParser):
    """Collects the links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the address of a link."""
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]


def format_entry(name: str, version: str, hashes: list[str]) -> str:
    """Return the lines of a package."""
    return " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{digest}" for digest in hashes)]) + "\n"


def parse_pins(text: str) -> dict[str, str]:
    """Return the versions by name of a lock or of constraints."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s\\]+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def find_problems(lock_text: str, constraints_text: str, project_text: str) -> list[str]:
    """Return what is missing or differs between the lock, the constraints and the requirements of the project."""
    lock, constraints = parse_pins(lock_text), parse_pins(constraints_text)
    project = tomllib.loads(project_text)
    problems = [
        f"{name}: {constraints.get(name, 'missing')} in constraints.txt, {lock.get(name, 'missing')} in the lock"
        for name in sorted(constraints.keys() | lock.keys())
        if constraints.get(name) != lock.get(name) and not UNLOCKED.fullmatch(name)
    ]
    problems += [
        f"{name}: no hash"
        for name in lock
        if not re.search(rf"^{name}==\S+ \\\n    --hash=sha256:[0-9a-f]{{64}}", lock_text, re.M)
    ]
    build_requirements = [Requirement(text) for text in project["build-system"]["requires"]]
    problems += [
        f"build-system: {each} is not pinned" for each in build_requirements if "==" not in str(each.specifier)
    ]
    extras = project["project"]["optional-dependencies"].values()
    wanted = [Requirement(text) for group in (project["project"]["dependencies"], *extras) for text in group]
    for each in (*wanted, *build_requirements):
        name = canonicalize_name(each.name)
        if name == "ctta" or UNLOCKED.fullmatch(name):
            continue
        if name not in lock or not each.specifier.contains(lock[name], prereleases=True):
            problems.append(f"{name}: {lock.get(name, 'missing')} in the lock, but pyproject.toml needs {each}")
    return problems


if __name__ == "__main__":
    main()
