"""A guarded method keeps every promise of the contract, whatever method is inside."""

import pytest
from torch import Tensor, nn

import ctta
from ctta.guard import Guarded
from ctta.testing import CHECKS, NETWORKS, ContractCase

INSIDE = {"tent": {}, "cotta": {"views": ctta.views.image_views(2)}}


class GuardedCase(ContractCase):
    """The method of a case, guarded; every batch is inspected and good for a snapshot, so that a check meets all."""

    def make_model(self, net: nn.Module | None = None) -> Guarded:
        return Guarded(super().make_model(net), inspect_every=1, snapshot_every=1)

    def make_batch(self, number: int, size: int = 50) -> Tensor:
        return super().make_batch(number, size)


def case(method: str, network: str) -> GuardedCase:
    return GuardedCase(ctta.METHODS[method], NETWORKS[network], INSIDE[method])


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("method", INSIDE)
def test_contract_with_batch_norm(method: str, check: str) -> None:
    CHECKS[check](case(method, "batch_norm"))


@pytest.mark.parametrize("network", ["vit", "segmentation"])
def test_contract_on_other_networks(network: str) -> None:
    for name in ("check_resume_is_bit_identical", "check_predict_equals_next_adapt"):
        CHECKS[name](case("tent", network))
        CHECKS[name](case("cotta", network))
