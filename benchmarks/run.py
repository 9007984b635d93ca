"""Measure all speed and memory ratios; print a table and write benchmarks/results.json.

    python benchmarks/run.py [MODULE ...]

With names of modules, such as ``method_speed``, only these are run, and their rows are replaced. A missed target is
marked but is no failure: single ratios vary on a busy machine. Takes minutes on two idle cores. Then
``benchmarks/draw_speed.py`` draws the figure of docs/results/performance.md.
"""

import sys
import time
from pathlib import Path

import checkpoint_speed
import draw_speed
import growth
import guard_speed
import memory_use
import method_speed
import norm_speed
import segformer_step
import step_speed
from measurements import Measurement, read_results, write_results

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
