"""What a guard knows of its model; nothing where a stream has none."""

from typing import Any

from ctta.base import AdaptiveModel
from ctta.checkpoint.manifest import nested_models
from ctta.guard import Event, Monitored
from ctta.serve.errors import Refusal


def method_of(model: AdaptiveModel) -> AdaptiveModel:
    """The method itself, which alone knows how often it has learnt."""
    return model.unwrapped


def parts_of(model: AdaptiveModel) -> list[AdaptiveModel]:
    """The model and those inside it; all have a source."""
    return [part for _, part in nested_models(model)]


def has_learnt(model: AdaptiveModel) -> bool:
    """Whether the last batch was learnt from; a guard may have let the method rest."""
    return model.health.adapted if isinstance(model, Monitored) else True


def collapse_score(model: AdaptiveModel) -> float | None:
    """1 and above is an alarm."""
    return round(model.collapse_score, 4) if isinstance(model, Monitored) else None


def health(model: AdaptiveModel) -> dict[str, Any]:
    """The guard's signals by name."""
    return model.health.as_dict() if isinstance(model, Monitored) else {}


def events_since(model: AdaptiveModel, last: Event | None) -> list[Event]:
    """What the guard did after an event that was seen; all that it still knows if that one is forgotten."""
    events = model.events if isinstance(model, Monitored) else []
    places = [place for place, event in enumerate(events) if event is last]
    return events[places[0] + 1 :] if places else events


def roll_back(model: AdaptiveModel) -> None:
    """To the last known-good snapshot."""
    if not isinstance(model, Monitored):
        raise Refusal(409, "the stream has no guard, so there is nothing to roll back to: reset it")
    model.rollback()
