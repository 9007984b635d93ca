"""Ratios of time and memory from one run: code and baseline take turns, so that noise affects both alike."""

import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Measurement:
    """One row of the table.

    Attributes:
        name: What is divided by what.
        ratio: The measured ratio, a median over pairs where it is one of times.
        target: Its upper bound.
        ms_per_image: The time of an image, where it is a step of a method.
        low: The lower end of the ratio's 95 % interval, where pairs were repeated.
        high: Its upper end.
    """

    name: str
    ratio: float
    target: float
    ms_per_image: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether the ratio is within the target."""
        return self.ratio <= self.target

    def __str__(self) -> str:
        time = "" if self.ms_per_image is None else f"{self.ms_per_image:8.2f} ms/image"
        interval = "" if self.low is None else f"  {self.low:.3f} to {self.high:.3f}"
        return f"{self.name:74}{self.ratio:7.3f}{self.target:8.3f}{time}{interval}  {'' if self.is_met else 'missed'}"


def seconds(call: Callable[[], object]) -> float:
    """Return the time of a call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def time_ratio(ours: Callable[[], object], baseline: Callable[[], object], pairs: int, *, warm_up: int = 1) -> "Ratio":
    """Return the ratio of the times over pairs of calls, whose order alternates."""
    for _ in range(warm_up):
        baseline()
        ours()
    ratios = []
    for number in range(pairs):
        order = (baseline, ours) if number % 2 == 0 else (ours, baseline)
        spent = {call: seconds(call) for call in order}
        ratios.append(spent[ours] / spent[baseline])
    return Ratio.of_pairs(ratios)


@dataclass(frozen=True)
class Ratio:
    """A ratio that was measured repeatedly.

    Attributes:
        median: The median.
        low: The lower end of its 95 % interval.
        high: Its upper end.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of_pairs(cls, ratios: Sequence[float]) -> "Ratio":
        """Return the median of the ratios of pairs, and its interval."""
        return cls(statistics.median(ratios), *median_interval(ratios))

    def as_measurement(self, name: str, target: float) -> Measurement:
        """Return the row of a table."""
        return Measurement(name, self.median, target, low=self.low, high=self.high)


@dataclass(frozen=True)
class PairedTimes:
    """Times of two calls that took turns.

    Attributes:
        ratio: The median ratio over the pairs.
        ours: The median time of the first call in seconds.
        low: The lower end of the 95 % interval of the median ratio.
        high: Its upper end.
    """

    ratio: float
    ours: float
    low: float
    high: float


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, whatever the distribution: two of the sorted values.

    With fewer than six values, whose range covers the median less often, it is their range.
    """
    ordered, count = sorted(values), len(values)
    rank, tail = 0, 0.5**count  # probability that at most ``rank`` values lie below the median
    while rank + 1 < count / 2 and tail + math.comb(count, rank + 1) * 0.5**count <= 0.025:
        rank += 1
        tail += math.comb(count, rank) * 0.5**count
    return ordered[rank], ordered[-1 - rank]


def make_clock(device: torch.device) -> Callable[[], float]:
    """Return a clock: of the time that this process computes, or on an accelerator of the time until it is idle."""
    if device.type == "cpu":
        return time.process_time

    def wait_and_read() -> float:
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    return wait_and_read


def compare_times(
    ours: Callable[[], object],
    baseline: Callable[[], object],
    *,
    budget: float,
    max_pairs: int = 25,
    clock: Callable[[], float] = time.process_time,
) -> PairedTimes:
    """Compare the times that this process computes, whose number of threads is one; waiting for a core is not counted.

    Args:
        ours: The call to measure, whose order within a pair alternates.
        baseline: What it is compared to.
        budget: The seconds that the pairs may take. There are at least three.
        max_pairs: The largest number of pairs.
        clock: Tells the time, see :func:`make_clock`.

    Returns:
        The times.
    """
    times: list[tuple[float, float]] = []
    spent = 0.0
    while len(times) < 3 or (spent < budget and len(times) < max_pairs):
        pair = {}
        for call in (baseline, ours) if len(times) % 2 == 0 else (ours, baseline):
            started = clock()
            call()
            pair[call] = clock() - started
        times.append((pair[ours], pair[baseline]))
        spent += sum(pair.values())
    ratios = [mine / other for mine, other in times]
    return PairedTimes(
        statistics.median(ratios), statistics.median(mine for mine, _ in times), *median_interval(ratios)
    )


def live_bytes() -> int:
    """Return the memory of all tensors of this process; memory that several share counts once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter):  # isinstance would access the class of proxies, some of which warn
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the peak memory of tensors during a call, beyond what was allocated before."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # keep the profiler from logging into the table
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    totals = [event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]"]
    first = next(event["args"] for event in events if event["name"] == "[memory]")
    return int(max(totals) - (first["Total Allocated"] - first["Bytes"]))


def write_results(measurements: list[Measurement], path: Path) -> None:
    """Write the measurements as JSON."""
    rows = [{name: value for name, value in asdict(row).items() if value is not None} for row in measurements]
    rows = [{name: round(value, 4) if name != "name" else value for name, value in row.items()} for row in rows]
    path.write_text(json.dumps(rows, indent=1) + "\n")


def read_results(path: Path) -> list[Measurement]:
    """Return the measurements that :func:`write_results` wrote."""
    return [Measurement(**row) for row in json.loads(path.read_text())]
