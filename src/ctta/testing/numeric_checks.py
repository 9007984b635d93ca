"""Checks of extreme predictions and batches: nothing becomes NaN, and nothing crashes."""

import torch
from torch import Tensor, nn

from ctta.errors import ConfigError
from ctta.nn.heads import find_head
from ctta.testing.case import ContractCase, collect_tensors, register_check


@register_check
def check_extreme_batches_stay_finite(case: ContractCase) -> None:
    """Check that a single image, equal images and a short last batch leave logits and state finite."""
    one, equal = case.make_batch(1, 1), case.make_batch(2, 1).expand(6, -1, -1, -1)
    _check_finite(case, case.make_network(), [case.make_batch(0), one, equal, case.make_batch(3, 2)])


@register_check
def check_extreme_predictions_stay_finite(case: ContractCase) -> None:
    """Check logits of 1e4, uniform predictions, of which none is reliable, and two classes."""
    for scale, num_classes in ((1e4, None), (0.0, None), (1.0, 2)):
        net = case.make_network()
        if _change_head_(net, scale, num_classes):
            _check_finite(case, net, [case.make_batch(0), case.make_batch(1, 3)])


def _check_finite(case: ContractCase, net: nn.Module, stream: list[Tensor]) -> None:
    model = case.make_model(net)
    for x in stream:
        logits = model(x)
        assert logits.isfinite().all(), f"logits of a batch of {len(x)} are not finite"
        assert not model.last_step or model.last_step.loss.isfinite(), "the loss is not finite"
    assert model.num_skipped == 0, "a step was not finite"
    assert not any(tensor.isnan().any() for tensor in collect_tensors(model)), "a state is NaN"


@torch.no_grad()
def _change_head_(net: nn.Module, scale: float, num_classes: int | None) -> bool:
    """Scale the logits of a network, or keep the first classes only; return False if its head was not found."""
    try:
        head = net.get_submodule(find_head(net))
    except ConfigError:
        return False
    assert isinstance(head, nn.Linear | nn.Conv2d), f"the head is a {type(head).__name__}"
    head.weight = nn.Parameter(head.weight[:num_classes] * scale)
    if head.bias is not None:
        head.bias = nn.Parameter(head.bias[:num_classes] * scale)
    if isinstance(head, nn.Linear):
        head.out_features = len(head.weight)
    else:
        head.out_channels = len(head.weight)
    return True
