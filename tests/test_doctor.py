"""``ctta doctor`` tells what is installed, what is missing, and how to get it."""

import json
import subprocess
import sys
from importlib import metadata

import pytest
import torch
from typer.testing import CliRunner

import ctta
from ctta.cli.app import app
from ctta.cli.installation import Installation, inspect_installation, read_requirements

REQUIRES = [
    "torch>=2.6",
    'pillow>=10.0; extra == "data"',
    'ctta[data]; extra == "bench"',
    'typer>=0.15; extra == "bench"',
    'not-there>=1; extra == "serve"',
    'ctta[bench]; extra == "serve"',
    'ctta[serve]; extra == "dev"',
]


@pytest.fixture(scope="module")
def installation() -> Installation:
    return inspect_installation()


def test_this_installation_works(installation: Installation) -> None:
    assert installation.problems == []
    text = installation.describe()
    assert text.startswith(f"ctta {ctta.__version__} in ") and text.endswith("The library works.")
    assert f"torch {metadata.version('torch')}" in text
    (cpu,) = [each for each in installation.devices if each.device == "cpu"]
    assert cpu.seconds is not None and cpu.seconds > 0
    assert {"data", "bench", "serve"} <= installation.extras.keys() and "dev" not in installation.extras


def test_extras_are_resolved_and_missing_packages_named(
    monkeypatch: pytest.MonkeyPatch, installation: Installation
) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES)
    required, extras = read_requirements()
    assert [(each.name, each.needed, each.is_met) for each in required] == [("torch", ">=2.6", True)]
    assert {name: [each.name for each in needed] for name, needed in extras.items()} == {
        "data": ["pillow"],
        "bench": ["pillow", "typer"],
        "serve": ["pillow", "typer", "not-there"],
    }
    incomplete = Installation(**{**vars(installation), "extras": extras})
    assert "serve         missing not-there: pip install 'ctta[serve]'" in incomplete.describe()
    assert incomplete.problems == []  # an extra is no requirement


def test_an_old_package_and_a_failing_device_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy>=99.1", "torch>=2.6"])
    monkeypatch.setattr(ctta.Tent, "adapt_step", lambda self, x: torch.full((len(x), 10), float("nan")))
    found = inspect_installation()
    assert found.problems == [
        f"numpy {metadata.version('numpy')}, but ctta needs numpy>=99.1: pip install 'numpy>=99.1'",
        *(f"a step on {each.device} failed: the logits are not finite" for each in found.devices),
    ]
    assert found.devices[0].device == "cpu"
    assert "The library works." not in found.describe()
    outcome = CliRunner().invoke(app, ["doctor", "--json"])
    assert outcome.exit_code == 1 and json.loads(outcome.stdout)["problems"] == found.problems


def test_it_runs_without_any_extra() -> None:
    script = """
import sys
for name in ("typer", "rich", "click", "PIL", "requests", "filelock", "matplotlib", "jinja2"):
    sys.modules[name] = None
from ctta.cli import main
main(["doctor"])
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "The library works." in run.stdout
