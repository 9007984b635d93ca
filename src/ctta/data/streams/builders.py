"""The streams of the protocols that have a name: what they have in common, and what each makes of it."""

from dataclasses import dataclass, replace
from typing import Literal, TypedDict

from ctta.core.validation import check_positive
from ctta.data.datasets.base import CorruptionDataset
from ctta.data.streams.correlation import Sampler, correlated, label_shift, long_tail
from ctta.data.streams.foreign import foreign
from ctta.data.streams.mixture import mixed
from ctta.data.streams.recurrence import cdc, cyclic, recurring, rounds
from ctta.data.streams.sequences import clean, continual, gradual, single
from ctta.data.streams.stream import Stream
from ctta.errors import ConfigError

Data = CorruptionDataset | Stream

#: What users call the attributes of :class:`CorruptionSequence` that have another name on the command line.
OPTION_NAMES = {"order": "orders", "names": "corruptions", "num_rounds": "rounds"}


class Corruptions(TypedDict):
    """Keyword arguments that the functions for sequences of corruptions share."""

    order: int | None
    names: tuple[str, ...] | None
    limit: int | None
    batch_size: int | None


@dataclass(frozen=True)
class CorruptionSequence:
    """What the protocols over corruptions have in common; None is the protocol's own choice.

    Attributes:
        order: As for :func:`continual`.
        names: As for :func:`continual`.
        severity: As for :func:`continual`.
        limit: As for :func:`continual`.
        batch_size: As for :func:`continual`.
        num_rounds: How often the corruptions come; whatever a protocol draws is drawn anew in every round.
    """

    order: int | None = None
    names: tuple[str, ...] | None = None
    severity: float | None = None
    limit: int | None = None
    batch_size: int | None = None
    num_rounds: int | None = None

    @property
    def corruptions(self) -> Corruptions:
        """The corruptions and sizes as keyword arguments, without the severity."""
        return {"order": self.order, "names": self.names, "limit": self.limit, "batch_size": self.batch_size}

    @property
    def chosen_severity(self) -> float:
        """The severity, by default 5."""
        return 5 if self.severity is None else self.severity

    def open(self, data: Data) -> Stream:
        """Return one corruption after the other, round after round.

        Args:
            data: As for :func:`continual`.

        Returns:
            The stream.
        """
        return self.repeat(continual(data, severity=self.chosen_severity, **self.corruptions))

    def repeat(self, stream: Stream) -> Stream:
        """Return the rounds of a stream.

        Args:
            stream: The stream of one round.

        Returns:
            The stream of all rounds.
        """
        return rounds(stream, self.num_rounds) if self.num_rounds not in (None, 1) else stream

    def refuse(self, **reasons: str) -> None:
        """Raise a ConfigError for an attribute that a protocol decides by itself.

        Args:
            **reasons: What the protocol does instead, by attribute.
        """
        for name, reason in reasons.items():
            if getattr(self, name) is not None:
                raise ConfigError(f"{reason}: leave out the option {OPTION_NAMES.get(name, name)!r}")


def build_continual(data: Data, sequence: CorruptionSequence) -> Stream:
    """Show one corruption after the other at one severity."""
    return sequence.open(data)


def build_gradual(
    data: Data, sequence: CorruptionSequence, *, variant: Literal["paper", "authors"] = "paper"
) -> Stream:
    """Let the severity of each corruption rise from 1 to 5 and fall again."""
    sequence.refuse(severity="the protocol 'gradual' has every severity")
    return sequence.repeat(gradual(data, variant=variant, **sequence.corruptions))


def build_recurring(
    data: Data,
    sequence: CorruptionSequence,
    *,
    num_visits: int = 20,
    sampler: Sampler = "rotta",
    concentration: float = 0.1,
    num_slots: int | None = None,
    seed: int = 0,
) -> Stream:
    """Repeat the corruptions with few classes at a time, images drawn anew at each visit."""
    sequence.refuse(num_rounds="the protocol 'recurring' has visits (recurring,num_visits=20)")
    return recurring(
        data,
        num_visits=num_visits,
        sampler=sampler,
        concentration=concentration,
        num_slots=num_slots,
        seed=seed,
        severity=sequence.chosen_severity,
        **sequence.corruptions,
    )


def build_rotta(
    data: Data,
    sequence: CorruptionSequence,
    *,
    concentration: float = 0.1,
    num_slots: int | None = None,
    seed: int = 0,
) -> Stream:
    """Correlate labels in time: RoTTA's Dirichlet draw over min(C, 100) slots."""
    return correlated(sequence.open(data), sampler="rotta", concentration=concentration, num_slots=num_slots, seed=seed)


def build_note(
    data: Data,
    sequence: CorruptionSequence,
    *,
    concentration: float = 0.1,
    num_slots: int | None = None,
    seed: int = 0,
) -> Stream:
    """Correlate labels in time: NOTE's Dirichlet draw over C chunks of about the same size."""
    return correlated(sequence.open(data), sampler="note", concentration=concentration, num_slots=num_slots, seed=seed)


def build_sorted(data: Data, sequence: CorruptionSequence) -> Stream:
    """Show each corruption class by class."""
    return correlated(sequence.open(data), sampler="sorted")


def build_label_shift(
    data: Data,
    sequence: CorruptionSequence,
    *,
    imbalance: float = 500_000.0,
    num_per_phase: int = 100,
    seed: int = 0,
) -> Stream:
    """Draw images with replacement in one phase per class, in which this class prevails."""
    return label_shift(sequence.open(data), imbalance=imbalance, num_per_phase=num_per_phase, seed=seed)


def build_long_tail(
    data: Data,
    sequence: CorruptionSequence,
    *,
    imbalance: float = 100.0,
    head: Literal["constant", "per_domain"] = "constant",
    sampler: Sampler | None = None,
    concentration: float = 0.1,
    seed: int = 0,
) -> Stream:
    """Leave out images so that the classes have a long tail."""
    stream = sequence.open(data)
    return long_tail(stream, imbalance=imbalance, head=head, sampler=sampler, concentration=concentration, seed=seed)


def build_mixed(data: Data, sequence: CorruptionSequence, *, seed: int = 0) -> Stream:
    """Shuffle all corruptions together."""
    visit = replace(sequence, num_rounds=None).open(data)
    if sequence.num_rounds in (None, 1):
        return mixed(visit, seed=seed)
    shuffled = [mixed(visit, seed=seed + number).segments[0] for number in range(sequence.num_rounds)]
    segments = [replace(segment, visit=number) for number, segment in enumerate(shuffled)]
    return visit.with_segments(f"rounds={sequence.num_rounds} mixed seed={seed}", segments)


def build_mixed_correlated(
    data: Data,
    sequence: CorruptionSequence,
    *,
    sampler: Sampler = "note",
    concentration: float = 0.1,
    num_slots: int | None = None,
    seed: int = 0,
) -> Stream:
    """Shuffle all corruptions together, with few classes at a time."""
    stream = build_mixed(data, sequence, seed=seed)
    return correlated(stream, sampler=sampler, concentration=concentration, num_slots=num_slots, seed=seed)


def build_single(data: Data, sequence: CorruptionSequence) -> Stream:
    """Show one image at a time."""
    return single(sequence.open(data))


def build_cyclic(data: Data, sequence: CorruptionSequence, *, num_visits: int = 20, seed: int = 0) -> Stream:
    """Repeat the corruptions kind by kind: noise, blur, weather, digital."""
    sequence.refuse(num_rounds="the protocol 'cyclic' has visits (cyclic,num_visits=20)")
    return cyclic(data, num_visits=num_visits, seed=seed, severity=sequence.chosen_severity, **sequence.corruptions)


def build_cdc(
    data: Data,
    sequence: CorruptionSequence,
    *,
    num_visits: int = 20,
    sampler: Sampler = "iid",
    concentration: float = 0.1,
    seed: int = 0,
) -> Stream:
    """Repeat the corruptions in pieces of random length and order."""
    sequence.refuse(num_rounds="the protocol 'cdc' has visits (cdc,num_visits=20)")
    return cdc(
        data,
        num_visits=num_visits,
        sampler=sampler,
        concentration=concentration,
        seed=seed,
        severity=sequence.chosen_severity,
        **sequence.corruptions,
    )


def build_clean(data: Data, sequence: CorruptionSequence) -> Stream:
    """Show the images as they are, where a method should do no harm."""
    reason = "the protocol 'clean' has no corruption"
    sequence.refuse(order=reason, names=reason, severity=reason)
    return sequence.repeat(clean(data, limit=sequence.limit, batch_size=sequence.batch_size))


def build_foreign(
    data: Data, sequence: CorruptionSequence, *, images: str = "noise", fraction: float = 0.5, seed: int = 0
) -> Stream:
    """Put images that do not belong among the others: uniform noise, or drawn streets (images=streets)."""
    return foreign(sequence.open(data), images, fraction=fraction, seed=seed)


def build_no_wait(
    data: Data, sequence: CorruptionSequence, *, ratio: float | None = None, speed: float = 1.0
) -> Stream:
    """Do not wait for updates: batches that arrive during a step are answered without one."""
    check_positive("speed", speed)
    if ratio is not None:
        check_positive("ratio", ratio)
    stream = sequence.open(data)
    return stream.with_segments(f"no_wait{'' if speed == 1 else f' speed={speed:g}'}", stream.segments)
