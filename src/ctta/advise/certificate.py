"""Test whether a method harms a network, in the situations in which methods are known to harm; the certificate."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from torch import nn
from typing_extensions import Doc, deprecated

from ctta.advise.candidates import Candidate
from ctta.advise.images import ImageOptions, ImageSource, ImageStreams
from ctta.advise.influence import Influence, count_images, measure_influence
from ctta.advise.input_check import read_images
from ctta.advise.race import NUM_PROBES, SOURCE, WorkFolder, WorkProgress, identify, identify_method
from ctta.core.model import AdaptiveModel
from ctta.core.options import Option, parse_names, takes_options
from ctta.core.registry import DEFAULT_METHOD, resolve_method
from ctta.core.validation import check_integer, check_non_negative
from ctta.data.corruptions.registry import check_corruption
from ctta.data.datasets.base import CLEAN
from ctta.data.streams import Stream, foreign
from ctta.errors import ConfigError
from ctta.evaluation import Interval, Result, evaluate
from ctta.evaluation.display import format_range, render_text_table
from ctta.evaluation.intervals import estimate_difference
from ctta.evaluation.results import select_visits
from ctta.evaluation.steps import describe_environment, step_batch
from ctta.guard import Guarded, InputSpec
from ctta.io.atomic import atomic_write
from ctta.models import Normalized
from ctta.nn.surgery import find_weight, fingerprint

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
        num_images: Number of images.
        scenarios: The outcome of each scenario.
        influence: What one foreign image does to the other answers of a batch; empty if answers are independent.
        batch_stats: What BatchNorm normalizes by in the method, such as ``"auto"``.
        environment: Versions and machine.
    """

    method: str
    settings: Mapping[str, Any]
    guarded: bool
    network: str
    reference: str
    num_images: int
    scenarios: tuple[ScenarioOutcome, ...]
    influence: tuple[Influence, ...]
    batch_stats: Any
    environment: Mapping[str, Any]

    @property
    @deprecated("Certificate.num_pictures is called Certificate.num_images now")
    def num_pictures(self) -> int:
        """The former name of :attr:`num_images`."""
        return self.num_images

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
            return f"NOT SHOWN: more images are needed to tell in: {', '.join(unclear)}."
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
        """One row of texts per norm mode: the other answers of a batch that one image flips, by kind of image."""
        modes = dict.fromkeys(each.mode for each in self.influence)
        found = {(each.mode, each.image): each for each in self.influence}
        kinds = dict.fromkeys(each.image for each in self.influence)
        return [
            {"normalized by": mode, **{f"{kind} %": _format_influence(found[mode, kind]) for kind in kinds}}
            for mode in modes
        ]

    def __repr__(self) -> str:
        lines = [
            f"No-harm certificate for {self.title}",
            f"{self.network}; {self.num_images} images, scored against {self.reference}",
            "",
        ]
        lines += [render_text_table(self.rows), "", self.verdict]
        if self.influence:
            size = self.influence[0].batch_size
            lines += [
                "",
                f"Other answers of a batch of {size} that one image flips, mean ± 95 % interval (worst batch):",
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


CORRUPTIONS = ("gaussian_noise", "fog")
BATCH_SIZES = (1, 4, 16, 64)
NUM_VISITS, LAST_VISITS = 20, 5
VISIT_IMAGES, SIZE_IMAGES, MIN_BATCHES = 64, 160, 5
FOREIGN_FRACTION = 0.2


@dataclass(frozen=True)
class Scenario:
    """A situation that a method is tested in."""

    name: str
    description: str
    open: Callable[..., Stream]  # returns the stream for a seed
    select: Callable[[Result], Result] = lambda result: result  # returns the part of a result that counts


def _parse_points(text: str) -> float:
    """Parse points of error as a fraction."""
    try:
        points = float(text)
    except ValueError:
        points = -1.0
    if not 0 <= points <= 100:
        raise ConfigError(f"expected points of error from 0 to 100, such as 2, got {text!r}")
    return points / 100


def _parse_sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in parse_names(text)]
    except ValueError:
        raise ConfigError(f"expected batch sizes such as 1,4,16, got {text!r}") from None


@dataclass(frozen=True, kw_only=True)
class CertifyOptions(ImageOptions):
    """The options of :func:`ctta.certify` and ``ctta certify``."""

    method: Annotated[str, Doc("Name of the method.")] = DEFAULT_METHOD
    settings: Annotated[Mapping[str, Any] | None, Doc("Its settings, with the values of ``--set``.")] = None
    batch_size: Annotated[int, Doc("Images per step that the application will have.")] = 32
    guard: Annotated[bool, Option("Test the method inside a guard, as 'ctta adapt' and 'ctta serve' run it.")] = True
    tolerance: Annotated[
        float,
        Option("Accept this many points more error than Source. Default: 2.", "POINTS", parse=_parse_points),
        Doc("How much more error is not counted as harm, as a fraction."),
    ] = 0.02
    num_seeds: Annotated[int, Option("Test N seeds; the worst one counts.", "N", "--seeds", min=1)] = 3
    batch_sizes: Annotated[Sequence[int], Option("Test these batch sizes as well.", "LIST", parse=_parse_sizes)] = (
        BATCH_SIZES
    )
    corruptions: Annotated[
        Sequence[str], Option("Corrupt the images in these ways before the clean ones.", "NAMES", parse=parse_names)
    ] = CORRUPTIONS
    num_visits: Annotated[
        int, Option("Repeat the corruptions N times; the last five count.", "N", "--visits", min=5)
    ] = NUM_VISITS
    limit: Annotated[
        int | None, Option("Use at most N randomly chosen images.", "N", min=16), Doc("Largest number of images.")
    ] = 640


@takes_options(CertifyOptions)
def certify(net: nn.Module, images: ImageSource, options: CertifyOptions) -> Certificate:
    """Test whether a method harms a network: on clean images, sorted ones, small batches, long streams, foreign ones.

    In every scenario the method and the network without adaptation see the same batches, for several seeds of the
    order and of the method. The worst seed decides: the method passes if the upper end of the 95 % interval of its
    error minus that of the network is within the tolerance. First it checks, as :func:`ctta.advise` does, that the
    network expects the images that it is given.

    Args:
        net: The network, for images in [0, 1]; it is never changed.
        images: Clean images, as for :func:`ctta.advise`.
        options: The fields of :class:`CertifyOptions` as keywords.

    Returns:
        The certificate: print it, or ``certificate.write("certificate")``.

    Raises:
        ConfigError: The network expects other images, or an argument is not valid.
        DataError: The images cannot be read.
    """
    batch_size = options.batch_size
    check_integer("num_seeds", options.num_seeds, 1)
    check_integer("num_visits", options.num_visits, LAST_VISITS)
    check_non_negative("tolerance", options.tolerance)
    candidate = Candidate(options.method, dict(options.settings or {}))
    if candidate.method == SOURCE.method:
        raise ConfigError("Source is what methods are compared with: name another method")
    steps = [*((name, check_corruption(name, options.severity)) for name in options.corruptions), (CLEAN, 0.0)]
    labeled, _ = read_images(net, images, options, limit=options.limit)
    scenarios = _list_scenarios(ImageStreams(labeled), steps, batch_size, options.batch_sizes, options.num_visits)
    with nullcontext(options.folder) if options.folder else TemporaryDirectory(prefix="ctta-certify-") as path:
        work = WorkFolder(Path(path), [*identify(net, labeled), identify_method(candidate), options.guard])
        costs = _measure_costs(scenarios, net, candidate, work, options)
        by_image = costs[SOURCE.method, batch_size] / batch_size
        seconds = by_image * count_images(net, len(labeled.images), batch_size)
        for each in scenarios:
            stream = each.open(seed=0)
            both = sum(costs[role, stream.batch_size] for role in (SOURCE.method, candidate.method))
            seconds += options.num_seeds * len(stream) * both
        progress = WorkProgress(options.on_progress)
        progress.plan(seconds)
        outcomes = [_test(each, net, candidate, work, progress, costs, options) for each in scenarios]

        def run_cell(name: str, num_images: int, measure: Callable[[], float]) -> float:
            file = f"influence {batch_size} {name}.json"
            is_known = (work.path / file).exists()
            flipped = float(work.read_or_make(file, measure))
            progress.add(by_image * num_images, is_new=not is_known)
            return flipped

        influence = measure_influence(net, labeled, batch_size=batch_size, run_cell=run_cell)
    inner = net.net if isinstance(net, Normalized) else net
    return Certificate(
        resolve_method(options.method).label,
        candidate.settings,
        options.guard,
        f"{type(inner).__name__} {fingerprint(net)[:12]}",
        labeled.reference,
        len(labeled.images),
        tuple(outcomes),
        tuple(influence),
        candidate.build(net).batch_stats,
        describe_environment(find_weight(net).device),
    )


def _measure_costs(
    scenarios: Sequence[Scenario], net: nn.Module, candidate: Candidate, work: WorkFolder, options: CertifyOptions
) -> dict[tuple[str, int], float]:
    """Return the seconds that a batch of each size takes, without and with the method; measured once per folder."""
    streams = {each.open(seed=0).batch_size: each.open(seed=0) for each in scenarios}

    def measure() -> list[tuple[str, int, float]]:
        found = []
        for size, stream in streams.items():
            batches = [batch.x for batch, _ in zip(stream, range(NUM_PROBES), strict=False)]
            for name, model in (
                (SOURCE.method, _build_source(candidate, net)),
                (candidate.method, _build(candidate, net, 0, guard=options.guard)),
            ):
                step_batch(model, batches[0])
                started = time.perf_counter()
                for x in batches:
                    step_batch(model, x).cpu()
                found.append((name, size, (time.perf_counter() - started) / len(batches)))
        return found

    sizes = "-".join(map(str, streams))
    return {(name, size): seconds for name, size, seconds in work.read_or_make(f"costs-{sizes}.json", measure)}


def _test(
    scenario: Scenario,
    net: nn.Module,
    candidate: Candidate,
    work: WorkFolder,
    progress: WorkProgress,
    costs: Mapping[tuple[str, int], float],
    options: CertifyOptions,
) -> ScenarioOutcome:
    """Compare the method with Source for every seed."""
    pairs = []
    for seed in range(options.num_seeds):
        stream = scenario.open(seed=seed)
        results = []
        for role, name, model in (
            ("source", SOURCE.method, _build_source(candidate, net)),
            ("method", candidate.method, _build(candidate, net, seed, guard=options.guard)),
        ):
            start, by_batch = progress.done, costs[name, stream.batch_size]
            folder = work.path / f"{stream.hash}-{seed}-{role}"
            result = evaluate(model, stream, folder=folder, on_batch=partial(progress.add, by_batch))
            results.append(scenario.select(result))
            progress.done = start + by_batch * len(stream)  # also what was done before an interruption
        pairs.append(results)
    known = [found for source, method in pairs if (found := estimate_difference([method], [source], short_blocks=True))]
    return ScenarioOutcome(
        scenario.name,
        scenario.description,
        fmean(source.error for source, _ in pairs),
        fmean(method.error for _, method in pairs),
        # None if one is missing, since that one may be worse.
        max(known, key=lambda each: each.high) if len(known) == len(pairs) else None,
        options.num_seeds,
        options.tolerance,
    )


def _build_source(candidate: Candidate, net: nn.Module) -> AdaptiveModel:
    """Return the network as trained, in the precision of the candidate."""
    return replace(SOURCE, amp=candidate.settings.get("amp")).build(net)


def _build(candidate: Candidate, net: nn.Module, seed: int, *, guard: bool) -> AdaptiveModel:
    """Return a new model of the candidate for a seed."""
    if "seed" in signature(resolve_method(candidate.method).method).parameters:
        candidate = replace(candidate, settings=candidate.settings | {"seed": seed})
    model = candidate.build(net)
    return Guarded(model, input_spec=InputSpec(low=0, high=1, any_size=True)) if guard else model


def _list_scenarios(
    streams: ImageStreams,
    steps: Sequence[tuple[str, float]],
    batch_size: int,
    batch_sizes: Sequence[int],
    num_visits: int,
) -> list[Scenario]:
    names = ", ".join(name if name != CLEAN else "clean" for name, _ in steps)

    build = partial(streams.build_stream, batch_size=batch_size)
    plain = partial(build, steps)
    scenarios = [
        Scenario("clean images", f"as they are, in batches of {batch_size}", partial(build, [(CLEAN, 0.0)])),
        Scenario("corruptions", f"{names}, in batches of {batch_size}", plain),
    ]
    for size in dict.fromkeys(each for each in batch_sizes if each != batch_size):
        limit = max(SIZE_IMAGES, MIN_BATCHES * size)
        scenarios.append(Scenario(f"batches of {size}", names, partial(plain, batch_size=size, limit=limit)))
    return [
        *scenarios,
        Scenario("sorted by class", f"{names}, one class after the other", partial(plain, order="sorted")),
        Scenario(
            f"{num_visits} visits",
            f"{names}, again and again; error in the last {LAST_VISITS} visits",
            partial(plain, limit=VISIT_IMAGES, visits=num_visits),
            lambda result: select_visits(result, range(num_visits - LAST_VISITS, num_visits)),
        ),
        Scenario(
            "foreign images",
            f"{names}, with {100 * FOREIGN_FRACTION:.0f} % of noise among them",
            lambda seed: foreign(plain(seed=seed), "noise", fraction=FOREIGN_FRACTION, seed=seed),
        ),
    ]
