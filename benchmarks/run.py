"""Measure all speed and memory ratios; print a table and write benchmarks/results.json.

    python benchmarks/run.py

A missed target is marked but is no failure: single ratios vary on a busy machine. Takes minutes on two idle cores.
"""

from pathlib import Path

import checkpoint_speed
import growth
import guard_speed
import memory_use
import segformer_step
import step_speed
from measurements import Measurement, write_results

RESULTS = Path(__file__).parent / "results.json"


def main() -> None:
    """Run every benchmark that has a target."""
    print(f"{'':74}{'ratio':>7}{'target':>8}")
    measurements: list[Measurement] = []
    for module in (step_speed, guard_speed, segformer_step, growth, memory_use, checkpoint_speed):
        for measurement in module.measure():
            print(measurement, flush=True)
            measurements.append(measurement)
    write_results(measurements, RESULTS)


if __name__ == "__main__":
    main()
