"""Measure all speed and memory ratios; print a table and write benchmarks/speed/results.json.

    python -m benchmarks.speed.run [MODULE ...]

With names of modules, such as ``method_speed``, only these are run, and their rows are replaced. A missed target is
marked but is no failure: single ratios vary on a busy machine. Takes minutes on two idle cores. Then
``benchmarks/draw/speed.py`` draws the figure of docs/results/performance.md.
"""

import sys
import time
from pathlib import Path

from benchmarks.draw import speed as draw_speed
from benchmarks.speed import checkpoint as checkpoint_speed
from benchmarks.speed import growth, segformer_step
from benchmarks.speed import guard as guard_speed
from benchmarks.speed import memory as memory_use
from benchmarks.speed import methods as method_speed
from benchmarks.speed import norms as norm_speed
from benchmarks.speed import steps as step_speed
from benchmarks.speed.measurements import Measurement, read_results, write_results

RESULTS = Path(__file__).parent / "results.json"
MODULES = (step_speed, norm_speed, method_speed, guard_speed, segformer_step, growth, memory_use, checkpoint_speed)


def main() -> None:
    """Run every benchmark that has a target, or those that are named."""
    names = sys.argv[1:] or [module.__name__ for module in MODULES]
    if unknown := {*names} - {module.__name__ for module in MODULES}:
        sys.exit(f"no benchmarks {sorted(unknown)}: choose among {[module.__name__ for module in MODULES]}")
    print(f"{'':74}{'ratio':>7}{'target':>8}")
    measurements: list[Measurement] = []
    started = time.monotonic()
    for module in MODULES:
        for measurement in module.measure() if module.__name__ in names else ():
            print(measurement, flush=True)
            measurements.append(measurement)
    print(f"{(time.monotonic() - started) / 60:.1f} minutes")
    if len(names) < len(MODULES):
        found = {measurement.name for measurement in measurements}
        measurements = [row for row in read_results(RESULTS) if row.name not in found] + measurements
    write_results(measurements, RESULTS)
    draw_speed.main()


if __name__ == "__main__":
    main()
