"""The no-harm certificate: what was tested, the outcome of each test with an interval, and the page."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ctta.advise.influence import Influence
from ctta.evaluation import Interval
from ctta.evaluation.display import format_range, render_text_table
from ctta.io.atomic import atomic_write

#: "unclear" if the interval is too wide to tell, so that nothing is certified.
Outcome = Literal["pass", "fail", "unclear"]


@dataclass(frozen=True)
class ScenarioOutcome:
    """A method against the network without adaptation in one scenario.

    Attributes:
        name: What the scenario is called.
        description: What the stream was.
        source_error: Error of the network without adaptation, mean over seeds.
        error: Error of the method, mean over seeds.
        difference: Error of the method minus that of Source, of the worst seed; None if there are too few batches.
        num_seeds: Number of seeds.
        tolerance: How much more error is not counted as harm.
    """

    name: str
    description: str
    source_error: float
    error: float
    difference: Interval | None
    num_seeds: int
    tolerance: float

    @property
    def outcome(self) -> Outcome:
        """Whether the method does no harm: the upper end of the interval of the worst seed is within the tolerance."""
        if self.difference is None:
            return "unclear"
        if self.difference.high <= self.tolerance:
            return "pass"
        return "fail" if self.difference.low > 0 else "unclear"


@dataclass(frozen=True, repr=False)
class Certificate:
    """Whether a method harms a network: printed, it is a table; :meth:`write` makes a page and a JSON file.

    Attributes:
        method: Name of the method.
        settings: Its settings.
        guarded: Whether it was inside :class:`ctta.Guarded`.
        network: The network: its class and fingerprint.
        reference: What errors were counted against.
        num_pictures: Number of pictures.
        scenarios: The outcome of each scenario.
        influence: What one foreign picture does to the other answers of a batch; empty if answers are independent.
        batch_stats: What BatchNorm normalizes by in the method, such as ``"auto"``.
        environment: Versions and machine.
    """

    method: str
    settings: Mapping[str, Any]
    guarded: bool
    network: str
    reference: str
    num_pictures: int
    scenarios: tuple[ScenarioOutcome, ...]
    influence: tuple[Influence, ...]
    batch_stats: Any
    environment: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        """Whether every scenario has passed."""
        return all(scenario.outcome == "pass" for scenario in self.scenarios)

    @property
    def verdict(self) -> str:
        """The outcome in a sentence."""
        tolerance = f"{100 * self.scenarios[0].tolerance:g} points"
        bad = [each.name for each in self.scenarios if each.outcome == "fail"]
        unclear = [each.name for each in self.scenarios if each.outcome == "unclear"]
        if bad:
            return f"FAIL: {self.title} is worse than the network without adaptation in: {', '.join(bad)}."
        if unclear:
            return f"NOT SHOWN: more pictures are needed to tell in: {', '.join(unclear)}."
        return f"PASS: {self.title} has at most {tolerance} more error than the network without adaptation, everywhere."

    @property
    def title(self) -> str:
        """The method with its settings, for people to read."""
        settings = "".join(f" {name}={value}" for name, value in self.settings.items())
        return f"{self.method}{settings}{' (guarded)' if self.guarded else ''}"

    @property
    def rows(self) -> list[dict[str, str]]:
        """One row of texts per scenario."""
        return [
            {
                "": each.name,
                "Source %": f"{100 * each.source_error:.1f}",
                "method %": f"{100 * each.error:.1f}",
                "worst seed": "" if each.difference is None else f"{100 * each.difference.estimate:+.1f}",
                "95 % interval": format_range(each.difference),
                "outcome": each.outcome,
            }
            for each in self.scenarios
        ]

    @property
    def influence_rows(self) -> list[dict[str, str]]:
        """One row of texts per norm mode: the other answers of a batch that one picture flips, by kind of picture."""
        modes = dict.fromkeys(each.mode for each in self.influence)
        found = {(each.mode, each.picture): each for each in self.influence}
        kinds = dict.fromkeys(each.picture for each in self.influence)
        return [
            {"normalized by": mode, **{f"{kind} %": _format_influence(found[mode, kind]) for kind in kinds}}
            for mode in modes
        ]

    def __repr__(self) -> str:
        lines = [
            f"No-harm certificate for {self.title}",
            f"{self.network}; {self.num_pictures} pictures, scored against {self.reference}",
            "",
        ]
        lines += [render_text_table(self.rows), "", self.verdict]
        if self.influence:
            size = self.influence[0].batch_size
            lines += [
                "",
                f"Other answers of a batch of {size} that one picture flips, mean ± 95 % interval (worst batch):",
                render_text_table(self.influence_rows),
                f"The method has batch_stats={self.batch_stats!r}.",
            ]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON."""
        scenarios = [asdict(each) | {"outcome": each.outcome} for each in self.scenarios]
        return asdict(self) | {"passed": self.passed, "verdict": self.verdict, "scenarios": scenarios}

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``certificate.html``, one page to print or hand on, and ``certificate.json``.

        Args:
            folder: Where to; created if it does not exist.

        Returns:
            The page.
        """
        from ctta.benchmark.report.pages import render_template  # which needs jinja2

        out = Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        texts = {
            "certificate.json": json.dumps(self.to_json(), indent=2, default=str) + "\n",
            "certificate.html": render_template("certificate.html", certificate=self),
        }
        for name, text in texts.items():
            with atomic_write(out / name) as temporary:
                temporary.write_text(text, encoding="utf-8")
        return out / "certificate.html"


def _format_influence(row: Influence) -> str:
    return f"{100 * row.flipped:.1f} ±{100 * row.half_width:.1f} ({100 * row.worst:.0f})"
