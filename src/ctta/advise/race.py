"""A short race of methods on a user's images: all on a part of them, then the best few on as many as time allows.

Every result is an evaluation of :func:`ctta.evaluate` in a folder, so that a race that was killed resumes where it
stopped. What depends on measured times, such as the number of images of the final, is written down before it is used.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import nn

from ctta.advise.calibration import calibrate_threshold
from ctta.advise.candidates import Candidate, Probe, probe, vary
from ctta.advise.images import ImageStreams, LabeledImages, StreamOrder, iter_batches
from ctta.core.options import Precision
from ctta.core.registry import DEFAULT_METHOD, resolve_method
from ctta.data.datasets.base import hash_array
from ctta.evaluation import Interval, Result, evaluate
from ctta.evaluation.display import subtract_printed
from ctta.evaluation.intervals import Statistic, average_value, estimate_difference, last_value
from ctta.io.atomic import atomic_write
from ctta.nn.surgery import fingerprint


class WorkFolder:
    """A folder of results that all depend on the same things, the ``identity`` (plain JSON); each is written once."""

    def __init__(self, folder: Path, identity: Any) -> None:
        self.path = folder / shorten(identity)
        self.path.mkdir(parents=True, exist_ok=True)

    def read_or_make(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what a JSON file holds, after making it if it does not exist."""
        path = self.path / name
        if not path.exists():
            content = make()
            with atomic_write(path) as temporary:
                temporary.write_text(json.dumps(content), encoding="utf-8")
        return json.loads(path.read_text(encoding="utf-8"))


def identify(net: nn.Module, labeled: LabeledImages) -> list[str]:
    """Return hashes of a network's weights, of its answers, as code can change too, and of the images."""
    arrays = labeled.predicted, labeled.images, labeled.targets
    return [fingerprint(net), *(hash_array(each) for each in arrays), str(labeled.seed)]


def identify_method(candidate: Candidate) -> str:
    """Return what identifies a method: its name and settings, and the content of its file if a user has written it."""
    name = resolve_method(candidate.method).name
    if not name.startswith("file:"):
        return candidate.key
    code = Path(name.removeprefix("file:").rpartition(":")[0]).read_bytes()
    return f"{candidate.key} {sha256(code).hexdigest()[:16]}"


def shorten(identity: Any) -> str:
    """Return a short hash of plain JSON.

    >>> shorten(["tent", 32])
    'b42a30de569c'
    """
    return sha256(json.dumps(identity).encode()).hexdigest()[:12]


SOURCE, DEFAULT = Candidate("source"), Candidate(DEFAULT_METHOD)
#: The default method where time is short.
FAST_DEFAULT = Candidate(f"{DEFAULT_METHOD}_fast")
#: Images of each domain in the first round, and the fewest batches.
SCREEN_IMAGES, SCREEN_BATCHES = 96, 5  # fewer batches would have no interval
#: Methods that take part in the final, beside the best of the cheap ones.
MAX_FINALISTS = 4
#: A method counts as cheap up to this many times the time of Source.
CHEAP = 2.0
#: The part of the time for one method in the first round, above which it is not tried.
MAX_SHARE = 0.1
NUM_PROBES = 3  # batches
#: The same for the default method, above which its fast form is tried instead.
MAX_DEFAULT_SHARE = 0.25
#: The part of the images that nothing is chosen by: a setting has to be better than the default one there too.
HELD_BACK = 0.25

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class RaceSettings:
    """What methods are compared on."""

    steps: tuple[tuple[str, float], ...]  # corruptions with their severities, one after the other
    batch_size: int
    order: StreamOrder
    budget: float  # seconds that the race should take at most
    seed: int = 0
    quick: bool = False  # whether all candidates take part in the final, and no variants are tried
    amp: Precision | None = None


@dataclass(frozen=True)
class RaceRow:
    """A candidate with its result.

    Attributes:
        candidate: The method and its settings.
        result: Its result, in the final or in the first round.
        difference: Error above that of Source on the same images; None if there are too few batches.
        memory: Bytes that it needs, see :class:`ctta.advise.candidates.Probe`.
    """

    candidate: Candidate
    result: Result
    difference: Interval | None
    memory: int

    @property
    def gain(self) -> float:
        """Points of error below Source, as a fraction; negative for a loss."""
        return -self.difference.estimate if self.difference else 0.0

    def points_below(self, other: "RaceRow") -> float:
        """Return the points of error below another row, as printed.

        Args:
            other: The row to compare with.

        Returns:
            The points; negative for a loss.
        """
        return subtract_printed(other.result.error, self.result.error)


@dataclass
class Race:
    """The outcome of a race.

    Attributes:
        source: Source in the final.
        finalists: The others in the final, the best first.
        dropped: Those that were dropped after the first round, the best first.
        left_out: Methods that were not tried, with the reason.
        num_screened: Images of each domain in the first round.
        num_final: Images of each domain in the final.
        has_labels: Whether errors are counted against labels, or against what Source answers on the clean images.
    """

    source: RaceRow
    finalists: list[RaceRow]
    dropped: list[RaceRow]
    left_out: dict[str, str]
    num_screened: int
    num_final: int
    has_labels: bool = True

    @property
    def default(self) -> RaceRow | None:
        """The default method, or its fast form, at its published settings; None if it cannot work."""
        return next((row for row in self.finalists if row.candidate in (DEFAULT, FAST_DEFAULT)), None)

    def choose(self, *, max_cost: float | None = None) -> RaceRow:
        """Return the cheapest candidate that no more expensive one is significantly better than.

        Args:
            max_cost: Largest time per image, in multiples of that of Source; None for any.

        Returns:
            The row. Where nothing is significantly better than Source, it is that of the default, which also adapts to
            what was not tried, unless the default has lost or takes longer than it may.
        """
        chosen, default = self.source, self.default
        most = float("inf") if max_cost is None else max_cost * self.source.result.ms_per_image
        affordable = [row for row in self.finalists if row.result.ms_per_image <= most]
        for row in sorted(affordable, key=lambda row: row.result.ms_per_image):
            if _is_worse(chosen, row):
                chosen = row
        return default if chosen is self.source and default in affordable and not self._has_lost(default) else chosen

    def _has_lost(self, row: RaceRow) -> bool:
        """Return whether a row has significantly more error than Source: in all, or on the clean images at the end."""
        # On clean images without labels, Source has none by definition.
        return _is_worse(row, self.source) or (self.has_labels and _is_worse(row, self.source, last_value))


@dataclass
class WorkProgress:
    """Seconds of work that are done, and that there are by the estimate."""

    report: OnProgress | None
    done: float = 0.0
    planned: float = 0.0

    def plan(self, seconds: float) -> None:
        """Expect this much more work."""
        self.planned = self.done + seconds

    def add(self, seconds: float, _record: object = None, *, is_new: bool = True) -> None:
        """Count work as done, and report it unless an earlier call has done it, which takes no time now."""
        self.done += seconds
        if self.report and is_new:
            self.report(round(self.done), max(round(self.planned), round(self.done) + 1))


@dataclass
class Racer:
    """Runs a race; see :func:`run_race`."""

    net: nn.Module
    streams: ImageStreams
    settings: RaceSettings
    work: WorkFolder
    progress: WorkProgress
    probes: dict[str, Probe] = field(default_factory=dict)

    def probe_all(self, candidates: Sequence[Candidate]) -> dict[str, str]:
        """Measure the cost of every candidate; return why some cannot be tried."""

        def measure() -> dict[str, Any]:
            size = self.settings.batch_size
            images = self.streams.labeled.images[: NUM_PROBES * size]
            batches = [x for x in iter_batches(self.net, images, size) if len(x) == min(size, len(images))]
            batches = batches if len(batches) > 1 else batches * 2
            found: dict[str, Any] = {}
            for number, candidate in enumerate((SOURCE, *candidates)):
                outcome = probe(replace(candidate, amp=self.settings.amp), self.net, batches)
                found[candidate.key] = outcome if isinstance(outcome, str) else asdict(outcome)
                self.progress.plan(len(candidates) - number)
                self.progress.add(1)
            return found

        content = self.work.read_or_make("probes.json", measure)
        failed = {key: value for key, value in content.items() if isinstance(value, str)}
        if SOURCE.key in failed:
            raise RuntimeError(f"the network fails without adaptation: {failed[SOURCE.key]}")
        self.probes |= {key: Probe(**value) for key, value in content.items() if key not in failed}
        return failed

    def plan_images(self, name: str, affordable: float, fewest: int, most: int) -> int:
        """Return how many images of each domain to use, whole batches where that leaves enough; written down once."""
        size = self.settings.batch_size
        number = min(most, max(fewest, int(max(affordable, 0.0)) // size * size))
        return int(self.work.read_or_make(name, lambda: {"num_images": number})["num_images"])

    def seconds(self, candidate: Candidate, num_images: int) -> float:
        """Return how long a candidate takes by the estimate."""
        return self.probes[candidate.key].ms_per_image / 1000 * num_images * len(self.settings.steps)

    def run_round(
        self, candidates: Sequence[Candidate], limit: int, round_name: str, streams: ImageStreams | None = None
    ) -> list[RaceRow]:
        """Evaluate Source and candidates on the first images of each domain; return their rows, Source first.

        An evaluation that was interrupted is resumed, and one that is complete is read. ``streams`` are of other
        images than those of the race.
        """
        given = self.settings
        stream = (streams or self.streams).build_stream(
            given.steps, batch_size=given.batch_size, order=given.order, limit=limit, seed=given.seed
        )
        rows: list[RaceRow] = []
        for candidate in (replace(each, amp=given.amp) for each in (SOURCE, *candidates)):
            probed = self.probes[candidate.key]
            seconds = probed.ms_per_image / 1000 * given.batch_size
            result = evaluate(
                candidate.build(self.net),
                stream,
                folder=self.work.path / round_name / shorten(candidate.key),
                name=candidate.label,
                on_batch=partial(self.progress.add, seconds),
            )
            difference = estimate_difference([result], [rows[0].result], short_blocks=True) if rows else None
            rows.append(RaceRow(candidate, result, difference, probed.memory))
        return rows


def run_race(
    net: nn.Module,
    streams: ImageStreams,
    candidates: Sequence[Candidate],
    settings: RaceSettings,
    folder: Path,
    *,
    on_progress: OnProgress | None = None,
) -> Race:
    """Compare candidates, without Source, and drop the losers early.

    The default method takes part in every round, first, or its fast form where the budget is short. A race of the same
    network, images and settings resumes in the folder. Progress is in seconds of work, those that are done and those
    that there are, by the estimate.
    """
    total = len(streams.labeled.images)
    limit = total if settings.quick else total - int(HELD_BACK * total)
    num_screened = min(limit, max(SCREEN_IMAGES, SCREEN_BATCHES * settings.batch_size))
    identity = [*identify(net, streams.labeled), [identify_method(each) for each in candidates], asdict(settings)]
    racer = Racer(net, streams, settings, WorkFolder(folder, identity), WorkProgress(on_progress))
    others = [each for each in candidates if each not in (DEFAULT, FAST_DEFAULT)]
    left_out = racer.probe_all([DEFAULT, FAST_DEFAULT, *others])
    able = [each for each in (DEFAULT, FAST_DEFAULT, *others) if each.key in racer.probes]
    if DEFAULT in able and FAST_DEFAULT in able:
        if racer.seconds(DEFAULT, num_screened) > MAX_DEFAULT_SHARE * settings.budget:
            able.remove(DEFAULT)
        elif FAST_DEFAULT not in candidates:  # the user has not named it
            able.remove(FAST_DEFAULT)
    if settings.quick:
        per_image = sum(racer.seconds(each, 1) for each in (SOURCE, *able))
        limit = racer.plan_images("quick.json", settings.budget / per_image, num_screened, limit)
        racer.progress.plan(per_image * limit)
        source, *rows = racer.run_round(able, limit, "final")
        return Race(
            source,
            sorted(rows, key=lambda row: row.result.error),
            [],
            left_out,
            limit,
            limit,
            streams.labeled.has_labels,
        )
    slow = {
        each.key: racer.probes[each.key].ms_per_image
        for each in able
        if each not in (DEFAULT, FAST_DEFAULT) and racer.seconds(each, num_screened) > MAX_SHARE * settings.budget
    }
    reason = "too slow for the budget"
    left_out |= {f"{key.split()[0]} with {time:.0f} ms per image": reason for key, time in slow.items()}
    able = [each for each in able if each.key not in slow]
    screening = sum(racer.seconds(each, num_screened) for each in (SOURCE, *able))
    racer.progress.plan(max(settings.budget, 1.5 * screening))
    source, *rows = racer.run_round(able, num_screened, "first")
    rows.sort(key=lambda row: row.result.error)
    chosen = _select_finalists(source, rows)
    winner = max((racer.seconds(row.candidate, 1) for row in chosen), default=0.0)
    per_image = sum(racer.seconds(each, 1) for each in (SOURCE, *(row.candidate for row in chosen))) + 3 * winner
    num_final = racer.plan_images("plan.json", (settings.budget - screening) / per_image, num_screened, limit)
    finalists = [row.candidate for row in chosen]
    racer.progress.plan(sum(racer.seconds(each, num_final) for each in (SOURCE, *finalists)))
    final_source, *final_rows = racer.run_round(finalists, num_final, "final")
    dropped = [row for row in rows if row.candidate not in finalists]
    race = Race(final_source, final_rows, dropped, left_out, num_screened, num_final, streams.labeled.has_labels)
    race.finalists += _refine(racer, race.choose(), num_final, streams.labeled.select(slice(limit, None)))
    race.finalists.sort(key=lambda row: row.result.error)
    return race


def _select_finalists(source: RaceRow, rows: Sequence[RaceRow]) -> list[RaceRow]:
    """Return the best rows that are not significantly worse than the very best, and the best of the cheap ones."""
    if not rows:
        return []
    best = rows[0]
    leading = [row for row in rows if row is best or not _is_worse(row, best)][:MAX_FINALISTS]
    cheap = [row for row in rows if row.result.ms_per_image <= CHEAP * source.result.ms_per_image][:1]
    default = [row for row in rows if row.candidate in (DEFAULT, FAST_DEFAULT)]
    chosen = [*default, *leading, *cheap]
    return [row for place, row in enumerate(chosen) if row not in chosen[:place]]


def _is_worse(row: RaceRow, other: RaceRow, statistic: Statistic = average_value) -> bool:
    difference = estimate_difference([row.result], [other.result], statistic, short_blocks=True)
    return difference is not None and difference.low > 0


def _refine(racer: Racer, chosen: RaceRow, num_images: int, held_back: LabeledImages) -> list[RaceRow]:
    """Try variants of the chosen candidate, unless that is Source; return the best one if it is an improvement.

    It has to be better by more than noise on the images of the final, and better on images that nothing was chosen by.
    """
    if chosen.candidate == SOURCE:
        return []
    # Rounded, so that what is tried is exactly what a user pastes.
    batches = iter_batches(racer.net, racer.streams.labeled.images[:num_images], racer.settings.batch_size)
    variants = vary(chosen.candidate, racer.net, round(calibrate_threshold(racer.net, batches), 3))
    racer.probes |= {each.key: racer.probes[chosen.candidate.key] for each in variants}
    racer.progress.plan(sum(racer.seconds(each, num_images) for each in variants))
    found = racer.run_round(variants, num_images, "final")[1:]
    better = [row for row in found if _is_worse(chosen, row)]
    if not better or not len(held_back.images):
        return []
    best = min(better, key=lambda row: row.result.error)
    rivals, streams = [chosen.candidate, best.candidate], ImageStreams(held_back)
    racer.progress.plan(sum(racer.seconds(each, len(held_back.images)) for each in rivals))
    _, before, after = racer.run_round(rivals, len(held_back.images), "held-back", streams)
    return [best] if after.points_below(before) > 0 else []
