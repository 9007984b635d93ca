"""The numbers of every method stay as they were recorded; see golden_values.py."""

import pytest
import torch
from golden_values import CASES, METHODS, PATH, compute_logits
from safetensors.torch import load_file

import ctta

RECORDED = load_file(PATH)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_recorded_ones(case: str) -> None:
    # Not bit by bit, because processors and numbers of threads round differently.
    torch.testing.assert_close(compute_logits(case), RECORDED[case], rtol=0, atol=1e-10)


def test_every_method_of_the_paper_is_recorded() -> None:
    """Those of the CoTTA paper, which come first; naive implementations hold the numbers of the others."""
    assert set(CASES) == set(RECORDED)
    assert set(list(ctta.METHODS)[:6]) <= set(METHODS)
