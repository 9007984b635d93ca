"""Every method keeps every promise of the contract on every kind of network."""

import pytest
import torch
from torch import Tensor, nn

import ctta
from ctta.testing import CHECKS, NETWORKS, Case

FEW_VIEWS = {"views": ctta.views.image_views(2)}
HYPERPARAMETERS = {"test_aug": FEW_VIEWS, "cotta": FEW_VIEWS}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", ctta.METHODS)
def test_contract(method: str, network: str, check: str) -> None:
    CHECKS[check](Case(ctta.METHODS[method], NETWORKS[network], HYPERPARAMETERS.get(method, {})))


def test_the_paper_preset_keeps_the_contract_on_pixels() -> None:
    views = ctta.views.multiscale_flip((0.5, 1))
    switches = {"gate": "element", "average": "probabilities", "predict_with": "teacher", "loss": "hard"}
    segmentation = {"segmentation": NETWORKS["segmentation"]}
    ctta.testing.check_method(ctta.CoTTA, networks=segmentation, views=views, threshold=0.3, **switches)


class Broken(ctta.Tent):
    """A method that breaks one promise after another."""


class ForgetsOnReset(Broken):
    def reset(self) -> "ForgetsOnReset":
        self.num_steps = 0
        return self


class ReadsTheGlobalGenerator(Broken):
    def adapt_step(self, x: Tensor) -> Tensor:
        return super().adapt_step(x) + torch.rand(())


class Hoards(Broken):
    def adapt_step(self, x: Tensor) -> Tensor:
        self.hoard = [*getattr(self, "hoard", []), x.clone()]
        return super().adapt_step(x)


class PredictsSomethingElse(Broken):
    def predict_step(self, x: Tensor) -> Tensor:
        return super().predict_step(x) + 1


class TouchesTheInput(Broken):
    def adapt_step(self, x: Tensor) -> Tensor:
        return super().adapt_step(x.mul_(0.5))


class HidesState(Broken):
    def adapt_step(self, x: Tensor) -> Tensor:
        self.hidden = getattr(self, "hidden", 0) + 1
        return super().adapt_step(x) * self.hidden


class TrainsOnAfterANonFiniteStep(Broken):
    def minimize(self, loss: Tensor, **figures: Tensor | None) -> bool:
        super().minimize(loss, **figures)
        with torch.no_grad():
            next(self.student.parameters()).fill_(1)
        return True


class SharesTheStudent(Broken):
    def fork(self) -> "SharesTheStudent":
        fresh = super().fork()
        fresh.student = self.student
        return fresh


class TakesAnything(Broken):
    def check_input(self, x: Tensor) -> None:
        pass


class LeavesDropoutOn(Broken):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.student.train()


@pytest.mark.parametrize(
    ("method", "check"),
    [
        (ForgetsOnReset, "reset_equals_new"),
        (ReadsTheGlobalGenerator, "neither_reads_nor_moves_the_global_generator"),
        (Hoards, "memory_is_bounded"),
        (PredictsSomethingElse, "predict_changes_nothing_and_equals_the_next_adapt"),
        (TouchesTheInput, "leaves_the_callers_network_and_input_alone"),
        (HidesState, "a_saved_stream_goes_on_bit_identically"),
        (HidesState, "reset_equals_new"),
        (TrainsOnAfterANonFiniteStep, "a_step_that_is_not_finite_is_skipped"),
        (SharesTheStudent, "forks_share_the_source_and_nothing_else"),
        (TakesAnything, "bad_input_is_refused_before_anything_changes"),
        (LeavesDropoutOn, "dropout_stays_off"),
    ],
)
def test_the_checks_find_broken_methods(method: type[ctta.AdaptiveModel], check: str) -> None:
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        CHECKS[check](Case(method, NETWORKS["batch_norm"], {}))


def test_check_method_names_the_check_and_the_network() -> None:
    with pytest.raises(AssertionError) as caught:
        ctta.testing.check_method(PredictsSomethingElse)
    assert "predict_changes_nothing_and_equals_the_next_adapt" in caught.value.__notes__[0]
    assert "batch_norm" in caught.value.__notes__[0]
