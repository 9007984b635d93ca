"""Networks for other tasks: the error says what they are, and which page shows what works for them."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ctta

ROOT = Path(__file__).parents[1]


class Answering(nn.Module):
    """A network that returns something else than logits."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.norm, self.output = nn.BatchNorm2d(3), output

    def forward(self, x: torch.Tensor) -> Any:
        self.norm(x)
        return self.output


BOXES = torch.rand(2, 4)


@pytest.mark.parametrize(
    ("output", "task"),
    [
        ([{"boxes": BOXES, "labels": torch.ones(2), "scores": torch.ones(2)}] * 2, "ctta.detect"),
        (SimpleNamespace(logits=torch.rand(2, 100, 92), pred_boxes=torch.rand(2, 100, 4)), "ctta.detect"),
        (SimpleNamespace(image_embeds=torch.rand(2, 8), logits_per_image=torch.rand(2, 5)), "CLIP"),
        ({"image_embeds": torch.rand(2, 8)}, "CLIP"),
    ],
    ids=["torchvision detector", "DETR", "CLIP", "CLIP as a dictionary"],
)
def test_the_error_leads_to_a_page_that_exists(output: Any, task: str) -> None:
    with pytest.raises(ctta.ConfigError, match=task) as raised:
        ctta.Tent(Answering(output))(torch.rand(2, 3, 8, 8))
    found = re.search(r"(docs/\S+\.md)(?:#(\w+))?$", str(raised.value))
    assert found is not None
    headings = re.findall(r"^#+ (.*)", (ROOT / found[1]).read_text(), re.MULTILINE)
    assert found[2] is None or found[2] in [each.lower().replace(" ", "-") for each in headings]


def test_the_page_on_libraries_sends_every_detector_to_one_place() -> None:
    rows = (ROOT / "docs" / "how-to" / "other-libraries.md").read_text().splitlines()
    assert [row.split("|")[2] for row in rows if row.startswith("|") and "detector" in row.split("|")[1]] == [
        " [`ctta.detect`](../tutorials/detectors.md) "
    ]


def test_whoever_says_where_the_logits_are_is_believed() -> None:
    output = {"boxes": BOXES, "scores": torch.rand(2, 5)}
    assert ctta.Source(Answering(output), output="scores")(torch.rand(2, 3, 8, 8)).shape == (2, 5)
