"""All ratios of this version: a table on the screen, and the same in benchmarks/results.json.

python benchmarks/run.py

A missed target is marked, and is no failure: a busy machine makes single ratios swing. Minutes on two quiet cores.
"""

from pathlib import Path

import checkpoint_speed
import growth
import guard_speed
import memory_use
import segformer_step
import step_speed
from measuring import Measurement, write_results

RESULTS = Path(__file__).parent / "results.json"


def main() -> None:
    print(f"{'':74}{'ratio':>7}{'target':>8}")
    measurements: list[Measurement] = []
    for part in (step_speed, guard_speed, segformer_step, growth, memory_use, checkpoint_speed):
        for measurement in part.measure():
            print(measurement, flush=True)
            measurements.append(measurement)
    write_results(measurements, RESULTS)


if __name__ == "__main__":
    main()
