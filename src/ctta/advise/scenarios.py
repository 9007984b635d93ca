"""Test whether a method harms a network, in the situations in which methods are known to harm."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from inspect import signature
from statistics import fmean
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import nn

from ctta.advise.candidates import Candidate
from ctta.advise.certificate import Certificate, ScenarioOutcome
from ctta.advise.influence import Influence, count_batches, measure_influence
from ctta.advise.pictures import (
    DEFAULT_SEVERITY,
    CorruptedPictures,
    ImageSource,
    StreamOrder,
    gather_images,
    label_pictures,
)
from ctta.advise.race import SOURCE, OnProgress
from ctta.advise.work_folder import WorkFolder, identify, identify_method, open_folder
from ctta.core.model import AdaptiveModel
from ctta.core.registry import resolve_method
from ctta.core.validation import check_integer, check_non_negative
from ctta.data.corruptions.registry import check_corruption
from ctta.data.datasets.corruptible import CLEAN
from ctta.data.streams import Stream, foreign
from ctta.errors import ConfigError
from ctta.evaluation import Interval, Result
from ctta.evaluation.environment import describe_environment
from ctta.evaluation.intervals import estimate_difference
from ctta.guard import Guarded, InputSpec
from ctta.models import Normalized
from ctta.nn.surgery import fingerprint

CORRUPTIONS = ("gaussian_noise", "fog")
BATCH_SIZES = (1, 4, 16, 64)
NUM_VISITS, LAST_VISITS = 20, 5
VISIT_IMAGES, SIZE_IMAGES, MIN_BATCHES = 64, 160, 5
FOREIGN_FRACTION = 0.2


@dataclass(frozen=True)
class Scenario:
    """A situation that a method is tested in.

    Attributes:
        name: What it is called.
        description: What the stream is.
        open: Returns the stream for a seed.
        select: Returns the part of a result that counts.
    """

    name: str
    description: str
    open: Callable[[int], Stream]
    select: Callable[[Result], Result] = lambda result: result


def certify(
    net: nn.Module,
    images: ImageSource,
    labels: ArrayLike | None = None,
    *,
    method: str,
    settings: Mapping[str, Any] | None = None,
    guard: bool = True,
    batch_size: int = 32,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    corruptions: Sequence[str] = CORRUPTIONS,
    severity: float = DEFAULT_SEVERITY,
    num_seeds: int = 3,
    num_visits: int = NUM_VISITS,
    tolerance: float = 0.02,
    limit: int | None = 640,
    size: tuple[int, int] | None = None,
    use_labels: bool | None = None,
    folder: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
) -> Certificate:
    """Test whether a method harms a network: on clean pictures, sorted ones, small batches, long streams, foreign ones.

    In every scenario the method and the network without adaptation see the same batches, for several seeds of the
    order and of the method. The worst seed decides: the method passes if the upper end of the 95 % interval of its
    error minus that of the network is within the tolerance.

    Args:
        net: The network, for images in [0, 1]; it is never changed.
        images: Clean pictures, as for :func:`ctta.advise`.
        labels: As for :func:`ctta.advise`.
        method: Name of the method.
        settings: Its settings, with the values of ``--set``.
        guard: Whether the method is inside :class:`ctta.Guarded`, as in ``ctta adapt`` and ``ctta serve``.
        batch_size: Images per step that the application will have.
        batch_sizes: Further batch sizes to test.
        corruptions: Corruptions that all scenarios but the first have before the clean pictures.
        severity: Their severity.
        num_seeds: Number of seeds.
        num_visits: How often the corruptions come in the long stream, of which the last five visits count.
        tolerance: How much more error is not counted as harm, as a fraction.
        limit: Largest number of pictures; None for all.
        size: As for :func:`ctta.advise`.
        use_labels: As for :func:`ctta.advise`.
        folder: Where the evaluations are written; called again after an interruption, it goes on from there.
        on_progress: Called with the number of batches that are done and that there are.

    Returns:
        The certificate: print it, or ``certificate.write("certificate")``.

    Raises:
        ConfigError: An argument is not valid.
        DataError: The pictures cannot be read.
    """
    check_integer("num_seeds", num_seeds, 1)
    check_integer("num_visits", num_visits, LAST_VISITS)
    check_non_negative("tolerance", tolerance)
    candidate = Candidate(method, dict(settings or {}))
    if candidate.method == SOURCE.method:
        raise ConfigError("Source is what methods are compared with: name another method")
    steps = [*((name, check_corruption(name, severity)) for name in corruptions), (CLEAN, 0.0)]
    clean = gather_images(images, labels, size=size, limit=limit, seed=0)
    pictures = label_pictures(net, clean, use_labels=use_labels)
    corrupted = CorruptedPictures(pictures)
    scenarios = _list_scenarios(corrupted, steps, batch_size, batch_sizes, num_visits)
    total = sum(2 * len(each.open(seed)) for each in scenarios for seed in range(num_seeds))
    total += count_batches(net, len(pictures.images), batch_size)
    progress = _BatchCount(total, on_progress)
    with open_folder(folder, "ctta-certify-") as path:
        work = WorkFolder(path, [*identify(net, pictures), identify_method(candidate), guard])
        outcomes = []
        for each in scenarios:
            differences, errors = _test(each, net, candidate, work, progress, guard=guard, num_seeds=num_seeds)
            outcomes.append(
                ScenarioOutcome(each.name, each.description, *errors, _find_worst(differences), num_seeds, tolerance)
            )
        influence = work.read_or_make(
            f"influence-{batch_size}.json",
            lambda: [
                asdict(row) for row in measure_influence(net, pictures, batch_size=batch_size, on_batch=progress.count)
            ],
        )
    inner = net.net if isinstance(net, Normalized) else net
    reference = next(iter(net.parameters()), torch.empty(0))
    return Certificate(
        resolve_method(method).label,
        candidate.settings,
        guard,
        f"{type(inner).__name__} {fingerprint(net)[:12]}",
        pictures.reference,
        len(pictures.images),
        tuple(outcomes),
        tuple(Influence(**each) for each in influence),
        candidate.build(net).batch_stats,
        describe_environment(reference.device),
    )


@dataclass
class _BatchCount:
    """Batches that are done, of those that there are."""

    total: int
    on_progress: OnProgress | None
    done: int = 0

    def count(self, _record: object = None) -> None:
        self.done += 1
        if self.on_progress:
            self.on_progress(self.done, self.total)


def _test(
    scenario: Scenario,
    net: nn.Module,
    candidate: Candidate,
    work: WorkFolder,
    progress: _BatchCount,
    *,
    guard: bool,
    num_seeds: int,
) -> tuple[list[Interval | None], tuple[float, float]]:
    """Return the difference to Source with each seed, and the mean errors of Source and of the method."""
    pairs = []
    for seed in range(num_seeds):
        stream = scenario.open(seed)
        results = []
        for role, model in ("source", SOURCE.build(net)), ("method", _build(candidate, net, seed, guard=guard)):
            start = progress.done
            result = work.evaluate(model, stream, f"{stream.hash}-{seed}-{role}", on_batch=progress.count)
            results.append(scenario.select(result))
            progress.done = start + len(stream)  # also batches that were done before an interruption
        pairs.append(results)
    differences = [estimate_difference([after], [before], short_blocks=True) for before, after in pairs]
    return differences, (fmean(before.error for before, _ in pairs), fmean(after.error for _, after in pairs))


def _build(candidate: Candidate, net: nn.Module, seed: int, *, guard: bool) -> AdaptiveModel:
    """Return a new model of the candidate for a seed."""
    if "seed" in signature(resolve_method(candidate.method).method).parameters:
        candidate = replace(candidate, settings=candidate.settings | {"seed": seed})
    model = candidate.build(net)
    return Guarded(model, input_spec=InputSpec(low=0, high=1, any_size=True)) if guard else model


def _find_worst(differences: Sequence[Interval | None]) -> Interval | None:
    """Return the interval with the highest upper end; None if one is missing, since that one may be worse."""
    known = [each for each in differences if each is not None]
    return max(known, key=lambda each: each.high) if len(known) == len(differences) else None


def _list_scenarios(
    pictures: CorruptedPictures,
    steps: Sequence[tuple[str, float]],
    batch_size: int,
    batch_sizes: Sequence[int],
    num_visits: int,
) -> list[Scenario]:
    names = ", ".join(name if name != CLEAN else "clean" for name, _ in steps)

    def opener(
        size: int,
        chosen: Sequence[tuple[str, float]] = steps,
        *,
        order: StreamOrder = "shuffled",
        limit: int | None = None,
        visits: int = 1,
    ) -> Callable[[int], Stream]:
        return lambda seed: pictures.build_stream(
            chosen, batch_size=size, order=order, limit=limit, visits=visits, seed=seed
        )

    def keep_last_visits(result: Result) -> Result:
        first = max(result.visits) + 1 - LAST_VISITS
        kept = [number for number, visit in enumerate(result.visits) if visit >= first]
        batches = tuple(
            replace(each, segment=each.segment - kept[0]) for each in result.batches if each.segment in kept
        )
        domains = tuple(result.domains[number] for number in kept)
        return replace(result, domains=domains, visits=(), batches=batches, num_batches=len(batches))

    plain = opener(batch_size)
    scenarios = [
        Scenario("clean pictures", f"as they are, in batches of {batch_size}", opener(batch_size, [(CLEAN, 0.0)])),
        Scenario("corruptions", f"{names}, in batches of {batch_size}", plain),
    ]
    for size in dict.fromkeys(each for each in batch_sizes if each != batch_size):
        limit = max(SIZE_IMAGES, MIN_BATCHES * size)
        scenarios.append(Scenario(f"batches of {size}", names, opener(size, limit=limit)))
    return [
        *scenarios,
        Scenario("sorted by class", f"{names}, one class after the other", opener(batch_size, order="sorted")),
        Scenario(
            f"{num_visits} visits",
            f"{names}, again and again; error in the last {LAST_VISITS} visits",
            opener(batch_size, limit=VISIT_IMAGES, visits=num_visits),
            keep_last_visits,
        ),
        Scenario(
            "foreign pictures",
            f"{names}, with {100 * FOREIGN_FRACTION:.0f} % of noise among them",
            lambda seed: foreign(plain(seed), "noise", fraction=FOREIGN_FRACTION, seed=seed),
        ),
    ]
