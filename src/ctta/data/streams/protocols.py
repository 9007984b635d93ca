"""The protocols by name: the streams that they build, and how a user types them, as in ``rotta,concentration=0.01``."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Literal, get_type_hints

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
    def corruptions(self) -> dict[str, Any]:
        """The corruptions and sizes as keyword arguments, without the severity."""
        return {name: getattr(self, name) for name in ("order", "names", "limit", "batch_size")}

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


def build_by(function: Callable[..., Stream], summary: str, **fixed: Any) -> Callable[..., Stream]:
    """Return the builder of a protocol that a function of ``data``, or of the ``stream`` of the corruptions, makes.

    The keywords of the function, but the fixed ones and those of :func:`continual`, are the settings of the protocol.
    """
    name, parameters = function.__name__, inspect.signature(function).parameters

    def build(data: Data, sequence: CorruptionSequence, **settings: Any) -> Stream:
        if "stream" in parameters:
            return function(sequence.open(data), **fixed, **settings)
        sequence.refuse(num_rounds=f"the protocol {name!r} has visits ({name},num_visits=20)")
        return function(data, severity=sequence.chosen_severity, **sequence.corruptions, **settings)

    builder = wraps(function)(build)
    keywords = [each for each in parameters.values() if each.default is not each.empty and each.name not in fixed]
    shown = [each.replace(kind=each.KEYWORD_ONLY) for each in keywords]
    builder.__doc__, builder.__signature__ = summary, inspect.Signature(shown)  # type: ignore[attr-defined]
    return builder


def build_sorted(data: Data, sequence: CorruptionSequence) -> Stream:
    """Show each corruption class by class."""
    return correlated(sequence.open(data), sampler="sorted")


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


def build_clean(data: Data, sequence: CorruptionSequence) -> Stream:
    """Show the images as they are, where a method should do no harm."""
    reason = "the protocol 'clean' has no corruption"
    sequence.refuse(order=reason, names=reason, severity=reason)
    return sequence.repeat(clean(data, limit=sequence.limit, batch_size=sequence.batch_size))


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
    """A protocol that can be chosen by its name."""

    build: Callable[..., Stream]  # from a dataset, a :class:`CorruptionSequence` and the settings of the protocol
    reference: str  # where the protocol comes from
    order: int | Literal["recipe"] | None = None  # unless the user chooses; "recipe" for that of the benchmark
    batch_size: int | None = None  # where the protocol is defined by it
    # Whether every batch waits for the step of the one before. If not, the settings ``ratio`` and ``speed`` decide how
    # many batches arrive during a step, see ``step_ratio`` of :func:`ctta.evaluate`.
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
    "recurring": NamedProtocol(
        build_by(recurring, "Repeat the corruptions with few classes at a time, images drawn anew at each visit."),
        "PeTTA, NeurIPS 2024",
        order=5,
    ),
    "rotta": NamedProtocol(
        build_by(
            correlated, "Correlate labels in time: RoTTA's Dirichlet draw over min(C, 100) slots.", sampler="rotta"
        ),
        "RoTTA, CVPR 2023",
        order=5,
    ),
    "note": NamedProtocol(
        build_by(
            correlated,
            "Correlate labels in time: NOTE's Dirichlet draw over C chunks of about the same size.",
            sampler="note",
        ),
        "NOTE, NeurIPS 2022",
    ),
    "sorted": NamedProtocol(build_sorted, "mariodoebler/test-time-adaptation"),
    "label-shift": NamedProtocol(
        build_by(label_shift, "Draw images with replacement in one phase per class, in which this class prevails."),
        "SAR, ICLR 2023",
    ),
    "long-tail": NamedProtocol(
        build_by(long_tail, "Leave out images so that the classes have a long tail."), "TRIBE, AAAI 2024"
    ),
    "mixed": NamedProtocol(build_mixed, "SAR, ICLR 2023"),
    "mixed-correlated": NamedProtocol(build_mixed_correlated, "ROID, WACV 2024"),
    "single": NamedProtocol(build_by(single, "Show one image at a time."), "SAR, ICLR 2023", batch_size=1),
    "cyclic": NamedProtocol(
        build_by(cyclic, "Repeat the corruptions kind by kind: noise, blur, weather, digital."),
        "after SloMo-Fast, arXiv 2511.18468",
    ),
    "cdc": NamedProtocol(
        build_by(cdc, "Repeat the corruptions in pieces of random length and order."), "ReservoirTTA, arXiv 2505.14511"
    ),
    "clean": NamedProtocol(build_clean, "POEM, NeurIPS 2024"),
    "foreign": NamedProtocol(
        build_by(
            foreign, "Put images that do not belong among the others: uniform noise, or drawn streets (images=streets)."
        ),
        "SoTTA, NeurIPS 2023",
    ),
    "no-wait": NamedProtocol(build_no_wait, "Alfarra et al., ICML 2024", order="recipe", waits=False),
}
