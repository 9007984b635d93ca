"""Measure the frames per second of the synthetic street at 128x256 in each condition.

python -m benchmarks.speed.streets [--frames N]

A frame is rendered by one thread; run on an idle machine. Exits with an error if the mean over all conditions is below
the target.
"""

import argparse
import sys
import time

from ctta.data.streets import CONDITIONS, HOLD_OUT, render_frame

TARGET = 50.0  # frames per second


def main() -> None:
    """Parse arguments, measure and print."""
    parser = argparse.ArgumentParser(description="Measure the speed of the synthetic street.")
    parser.add_argument("--frames", type=int, default=100, help="frames per condition")
    num_frames = parser.parse_args().frames
    render_frame(0)  # the textures are computed once
    seconds = cpu_seconds = 0.0
    for condition in (*CONDITIONS, *HOLD_OUT):
        split = "report" if condition in CONDITIONS else "choose"
        start, cpu_start = time.perf_counter(), time.process_time()
        for index in range(num_frames):
            render_frame(index, condition, split=split)
        elapsed, cpu_elapsed = time.perf_counter() - start, time.process_time() - cpu_start
        print(
            f"{condition:8}{num_frames / elapsed:7.0f} frames/s {1000 * cpu_elapsed / num_frames:8.1f} ms CPU",
            flush=True,
        )
        seconds += elapsed / num_frames
        cpu_seconds += cpu_elapsed / num_frames
    num_conditions = len(CONDITIONS) + len(HOLD_OUT)
    rate = num_conditions / seconds
    print(f"{'mean':8}{rate:7.0f} frames/s {1000 * cpu_seconds / num_conditions:8.1f} ms CPU")
    if rate < TARGET:
        sys.exit(f"target missed: {rate:.0f} frames/s, fewer than {TARGET:.0f}")


if __name__ == "__main__":
    main()
