"""Ratios from one run: ours and the bare network take turns, so that a noisy machine disturbs both alike."""

import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Measurement:
    """One row of the table: what was found, and what it should be at most."""

    name: str
    ratio: float
    target: float

    @property
    def is_met(self) -> bool:
        return self.ratio <= self.target

    def __str__(self) -> str:
        return f"{self.name:74}{self.ratio:7.3f}{self.target:8.3f}  {'' if self.is_met else 'missed'}"


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def time_ratio(ours: Callable[[], object], bare: Callable[[], object], pairs: int, *, warm_up: int = 1) -> float:
    """The median over pairs of ours / bare; every other pair in the other order."""
    for _ in range(warm_up):
        bare()
        ours()
    ratios = []
    for number in range(pairs):
        order = (bare, ours) if number % 2 == 0 else (ours, bare)
        spent = {call: seconds(call) for call in order}
        ratios.append(spent[ours] / spent[bare])
    return statistics.median(ratios)


def live_bytes() -> int:
    """Of all tensors that this process holds; memory that several share counts once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter):  # isinstance would ask proxies for their class, and some warn
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that the call holds at a time in tensors beyond what was there before, as torch's allocator counts."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler would write into the table
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
    rows = [{**asdict(row), "ratio": round(row.ratio, 4)} for row in measurements]
    path.write_text(json.dumps(rows, indent=1) + "\n")
