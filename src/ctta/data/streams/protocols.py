"""Protocols by name, and as a user types them: ``rotta,concentration=0.01``."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from ctta.core.hyperparameters import parse_hyperparameters
from ctta.data.streams.builders import (
    CorruptionSequence,
    Data,
    build_cdc,
    build_clean,
    build_continual,
    build_cyclic,
    build_foreign,
    build_gradual,
    build_label_shift,
    build_long_tail,
    build_mixed,
    build_mixed_correlated,
    build_no_wait,
    build_note,
    build_recurring,
    build_rotta,
    build_single,
    build_sorted,
)
from ctta.data.streams.stream import Stream
from ctta.errors import ConfigError, did_you_mean


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
