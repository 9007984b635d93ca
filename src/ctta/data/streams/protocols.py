"""The protocols by name: the streams that they build, and how a user types them, as in ``rotta,concentration=0.01``."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict, get_type_hints

from ctta.core.hyperparameters import parse_hyperparameters
from ctta.core.validation import check_positive
from ctta.data.datasets.base import CorruptionDataset
from ctta.data.streams.correlation import Sampler, correlated, label_shift, long_tail
from ctta.data.streams.foreign import foreign
from ctta.data.streams.recurrence import cdc, cyclic, recurring, rounds
from ctta.data.streams.sequences import clean, continual, gradual, single
from ctta.data.streams.stream import Stream, mixed
from ctta.errors import ConfigError, did_you_mean

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


@dataclass(frozen=True)
class NamedProtocol:
    """A protocol that can be chosen by its name.

    Attributes:
        build: Builds the stream from a dataset, a :class:`CorruptionSequence` and the settings of the protocol.
        reference: Where the protocol comes from.
        order: The order of the corruptions unless the user chooses; "recipe" for that of the benchmark.
        batch_size: The batch size, where the protocol is defined by it.
        waits: Whether every batch waits for the step of the one before. If not, the settings ``ratio`` and ``speed``
            decide how many batches arrive during a step, see ``step_ratio`` of :func:`ctta.evaluate`.
    """

    build: Callable[..., Stream]
    reference: str
    order: int | Literal["recipe"] | None = None
    batch_size: int | None = None
    waits: bool = True

    @property
    def summary(self) -> str:
        """One line about the protocol."""
        return (inspect.getdoc(self.build) or "").split("\n")[0]

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings of the protocol with their defaults."""
        return {
            parameter.name: parameter.default
            for parameter in inspect.signature(self.build).parameters.values()
            if parameter.default is not parameter.empty
        }


@dataclass(frozen=True)
class ChosenProtocol:
    """A protocol with the settings that a user has typed, see :func:`parse_protocol`.

    Attributes:
        name: Its name in :data:`PROTOCOLS`.
        settings: The settings that differ from its defaults.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def definition(self) -> NamedProtocol:
        """The protocol of this name."""
        return PROTOCOLS[self.name]

    @property
    def all_settings(self) -> dict[str, Any]:
        """All settings, also those that have their defaults."""
        return {**self.definition.defaults, **self.settings}

    def build(self, data: Data, sequence: CorruptionSequence) -> Stream:
        """Build the stream.

        Args:
            data: As for :func:`continual`.
            sequence: The corruptions and sizes.

        Returns:
            The stream.

        Raises:
            ConfigError: A setting is out of range, or does not go with the protocol.
        """
        return self.definition.build(data, sequence, **self.settings)


def parse_protocol(text: str) -> ChosenProtocol:
    """Return a protocol from a text, as ``--protocol`` takes it.

    Args:
        text: The name, and after commas settings by name. What is left out has its default.

    Returns:
        The protocol.

    Raises:
        ConfigError: There is no such protocol or setting, or a value is not allowed.

    >>> parse_protocol("rotta,concentration=0.01")
    ChosenProtocol(name='rotta', settings={'concentration': 0.01})
    """
    name, *settings = (part.strip() for part in text.split(","))
    if name not in PROTOCOLS:
        raise ConfigError(
            f"there is no protocol {name!r}{did_you_mean(name, PROTOCOLS)}; expected one of {', '.join(PROTOCOLS)}"
        )
    build = PROTOCOLS[name].build
    chosen = parse_hyperparameters(build, settings, owner=f"the protocol {name!r}")
    kinds = get_type_hints(build)
    for key, value in chosen.items():
        if isinstance(value, str) and kinds[key] in (int | None, float | None):  # no default tells the type
            raise ConfigError(f"{key} of the protocol {name!r} must be a number, got {value!r}")
    return ChosenProtocol(name, chosen)


#: Every protocol by its name on the command line.
PROTOCOLS: dict[str, NamedProtocol] = {
    "continual": NamedProtocol(build_continual, "CoTTA, CVPR 2022", order="recipe"),
    "gradual": NamedProtocol(build_gradual, "CoTTA, CVPR 2022", order="recipe"),
    "recurring": NamedProtocol(build_recurring, "PeTTA, NeurIPS 2024", order=5),
    "rotta": NamedProtocol(build_rotta, "RoTTA, CVPR 2023", order=5),
    "note": NamedProtocol(build_note, "NOTE, NeurIPS 2022"),
    "sorted": NamedProtocol(build_sorted, "mariodoebler/test-time-adaptation"),
    "label-shift": NamedProtocol(build_label_shift, "SAR, ICLR 2023"),
    "long-tail": NamedProtocol(build_long_tail, "TRIBE, AAAI 2024"),
    "mixed": NamedProtocol(build_mixed, "SAR, ICLR 2023"),
    "mixed-correlated": NamedProtocol(build_mixed_correlated, "ROID, WACV 2024"),
    "single": NamedProtocol(build_single, "SAR, ICLR 2023", batch_size=1),
    "cyclic": NamedProtocol(build_cyclic, "after SloMo-Fast, arXiv 2511.18468"),
    "cdc": NamedProtocol(build_cdc, "ReservoirTTA, arXiv 2505.14511"),
    "clean": NamedProtocol(build_clean, "POEM, NeurIPS 2024"),
    "foreign": NamedProtocol(build_foreign, "SoTTA, NeurIPS 2023"),
    "no-wait": NamedProtocol(build_no_wait, "Alfarra et al., ICML 2024", order="recipe", waits=False),
}
