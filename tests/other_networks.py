"""The contract on a network that the suite does not check every method on."""

from collections.abc import Callable
from typing import Any

from torch import nn

import ctta
from ctta.testing import CHECKS, ContractCase
from ctta.testing.case import SHORT_STREAM, count_learned_batches


def check_on(network: Callable[[], nn.Module], method: type[ctta.AdaptiveModel], **settings: Any) -> None:
    """Run every check, and let the method learn; the long stream of the memory check is test_contract.py's."""
    case = ContractCase(method, network, settings, SHORT_STREAM)
    for check in CHECKS.values():
        check(case)
    assert count_learned_batches(case) in (None, 3)
