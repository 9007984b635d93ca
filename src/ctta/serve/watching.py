"""What a guard knows of its model; nothing where a stream has none."""

from collections.abc import Iterator
from typing import Any

from ctta.base import AdaptiveModel
from ctta.serve.refusals import Refusal


def collapse_score(model: AdaptiveModel) -> float | None:
    """1 and above is an alarm."""
    return None


def health(model: AdaptiveModel) -> dict[str, float | None]:
    """The guard's signals by name."""
    return {}


def new_events(model: AdaptiveModel) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Kind, cause and details of what the guard did since it was last asked."""
    yield from ()


def roll_back(model: AdaptiveModel) -> None:
    """To the last known-good snapshot."""
    raise Refusal(409, "the stream has no guard, so there is nothing to roll back to: reset it")
