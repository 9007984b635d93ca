"""A guarded method passes every check of the contract, whatever method is inside."""

from functools import cache
from typing import Any

import pytest
from torch import Tensor, nn

import ctta
from ctta.guard import Guarded
from ctta.testing import CHECKS, NETWORKS, ContractCase, select_networks, select_settings

METHODS: dict[str, dict[str, Any]] = {"tent": {}, "cotta": {"views": ctta.views.image_views(2)}}


class GuardedCase(ContractCase):
    """A guarded method; every batch is inspected and may become a snapshot, so that checks meet both."""

    def make_model(self, net: nn.Module | None = None) -> Guarded:
        return Guarded(super().make_model(net), inspect_every=1, snapshot_every=1)

    def make_batch(self, number: int, size: int = 50) -> Tensor:
        return super().make_batch(number, size)


@cache
def make_case(method: str, network: str) -> GuardedCase:
    """Return the case, the same one for all checks, which share its first run."""
    return GuardedCase(ctta.METHODS[method], NETWORKS[network], METHODS[method])


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("method", METHODS)
def test_contract_with_batch_norm(method: str, check: str) -> None:
    CHECKS[check](make_case(method, "batch_norm"))


@pytest.mark.parametrize("check", ["check_resume_is_bit_identical", "check_predict_equals_next_adapt"])
@pytest.mark.parametrize(
    ("method", "network"),
    [
        ("tent", "vit"),
        ("cotta", "segmentation"),
        pytest.param("tent", "segmentation", marks=pytest.mark.long),
        pytest.param("cotta", "vit", marks=pytest.mark.long),
    ],
)
def test_contract_on_other_networks(method: str, network: str, check: str) -> None:
    CHECKS[check](make_case(method, network))


@pytest.mark.parametrize("method", sorted(ctta.METHODS))
def test_every_method_can_be_guarded(method: str) -> None:
    """With several batches, of which some methods learn from a memory of another size."""
    cls = ctta.METHODS[method]
    make_network = next(iter(select_networks(cls).values()))
    case = GuardedCase(cls, make_network, select_settings(cls))
    model = case.make_model()
    for number in range(5):
        logits = model(case.make_batch(number, 16))
        assert logits.isfinite().all() and model.health.step == number
