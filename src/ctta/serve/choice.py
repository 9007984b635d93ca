"""Methods by name, with settings that suit single images."""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from ctta.base import AdaptiveModel
from ctta.hyperparameters import parse_hyperparameters
from ctta.methods import METHODS, CoTTA
from ctta.serve.window import SHARE
from ctta.validation import check_choice
from ctta.views import fast_image_views

FAST = "cotta_fast"


def method_by_name(net: nn.Module, name: str, texts: Sequence[str] = ()) -> AdaptiveModel:
    """A method of the library, or ``cotta_fast``; BatchNorm's statistics are blended unless told otherwise.

    Args:
        net: the source network.
        name: of the method.
        texts: settings as one types them; see :func:`ctta.hyperparameters.parse_hyperparameters`.

    >>> from ctta.models import embedded
    >>> method_by_name(embedded(), "tent", ["lr=1e-4"]).batch_stats
    0.5
    """
    check_choice("method", name, (*METHODS, FAST))
    method = CoTTA if name == FAST else METHODS[name]
    given: dict[str, Any] = {"views": fast_image_views()} if name == FAST else {}
    if "batch_stats" in inspect.signature(method).parameters:
        given["batch_stats"] = SHARE
    return method(net, **given | parse_hyperparameters(method, texts, given))
