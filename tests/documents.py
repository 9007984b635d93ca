"""The code in the Markdown files of the project, for the tests that run it."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: Pages with code; those of docs/results are written by benchmarks/results/pages.py, and test_results compares them.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parents[-2] != ROOT / "docs" / "results"),
]
#: What a reader has before the first line of a page: a network, unlabeled batches and labeled ones.
PREAMBLE = """
import torch
import ctta
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 10)).eval()
stream = source_batches = recent_batches = [torch.rand(20, 3, 16, 16) for _ in range(2)]
x = stream[0]
loader = [(x, torch.arange(20) % 10) for x in stream]
"""
_CODE = re.compile(
    r"^(?P<indent> *)(?:<!-- setup\n(?P<setup>.*?)-->|```(?P<kind>python|sh)\n(?P<code>.*?)^ *```)",
    re.MULTILINE | re.DOTALL,
)


def read_python(page: Path) -> str:
    """Return the Python blocks of a page in their order, with what its comments ``<!-- setup ... -->`` prepare."""
    found = [match for match in _CODE.finditer(page.read_text()) if match["kind"] != "sh"]
    return "\n".join(_dedent(match["setup"] or match["code"], match["indent"]) for match in found)


def read_commands(page: Path) -> list[list[str]]:
    """Return the words of every line of the shell blocks of a page that calls ``ctta``."""
    lines = [
        line
        for match in _CODE.finditer(page.read_text())
        if match["kind"] == "sh"
        for line in match["code"].replace("\\\n", " ").splitlines()
    ]
    commands = [shlex.split(line, comments=True) for line in lines]
    return [words[words.index("ctta") :] for words in commands if "ctta" in words[:5]]


def _dedent(code: str, indent: str) -> str:
    return re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
