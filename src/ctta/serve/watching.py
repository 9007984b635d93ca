"""What a guard knows of its model; nothing where a stream has none."""

from typing import Any

from ctta.base import AdaptiveModel
from ctta.guard import Event, Guarded
from ctta.serve.errors import Refusal


def method_of(model: AdaptiveModel) -> AdaptiveModel:
    """The method itself, which alone knows how often it has learnt."""
    return model.inner if isinstance(model, Guarded) else model


def parts_of(model: AdaptiveModel) -> list[AdaptiveModel]:
    """The model and those inside it; all have a source."""
    return [model, model.inner, model.good] if isinstance(model, Guarded) else [model]


def has_learnt(model: AdaptiveModel) -> bool:
    """Whether the last batch was learnt from; a guard may have let the method rest."""
    return model.health.adapted if isinstance(model, Guarded) else True


def collapse_score(model: AdaptiveModel) -> float | None:
    """1 and above is an alarm."""
    return round(model.collapse_score, 4) if isinstance(model, Guarded) else None


def health(model: AdaptiveModel) -> dict[str, Any]:
    """The guard's signals by name."""
    return model.health.as_dict() if isinstance(model, Guarded) else {}


def events_since(model: AdaptiveModel, last: Event | None) -> list[Event]:
    """What the guard did after an event that was seen; all that it still knows if that one is forgotten."""
    events = model.events if isinstance(model, Guarded) else []
    places = [place for place, event in enumerate(events) if event is last]
    return events[places[0] + 1 :] if places else events


def roll_back(model: AdaptiveModel) -> None:
    """To the last known-good snapshot."""
    if not isinstance(model, Guarded):
        raise Refusal(409, "the stream has no guard, so there is nothing to roll back to: reset it")
    model.rollback()
