"""Frames per second of the embedded street at 128x256, in each kind of weather.

python benchmarks/streets_speed.py [--frames N]

A frame is drawn by one thread; run on a quiet machine. Fails if the mean over all weather misses the target.
"""

import argparse
import sys
import time

from ctta.synthetic import CONDITIONS, HOLD_OUT, render_frame

TARGET = 50.0  # frames per second


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how fast streets are drawn.")
    parser.add_argument("--frames", type=int, default=100, help="of each condition")
    count = parser.parse_args().frames
    render_frame(0)  # the textures are made once
    seconds = cpu_seconds = 0.0
    for condition in (*CONDITIONS, *HOLD_OUT):
        split = "report" if condition in CONDITIONS else "choose"
        start, cpu_start = time.perf_counter(), time.process_time()
        for index in range(count):
            render_frame(index, condition, split=split)
        took, cpu_took = time.perf_counter() - start, time.process_time() - cpu_start
        print(f"{condition:8}{count / took:7.0f} frames/s {1000 * cpu_took / count:8.1f} ms of one core", flush=True)
        seconds += took / count
        cpu_seconds += cpu_took / count
    kinds = len(CONDITIONS) + len(HOLD_OUT)
    print(f"{'mean':8}{kinds / seconds:7.0f} frames/s {1000 * cpu_seconds / kinds:8.1f} ms of one core")
    if kinds / seconds < TARGET:
        sys.exit(f"missed: {kinds / seconds:.0f} frames/s, fewer than {TARGET:.0f}")


if __name__ == "__main__":
    main()
