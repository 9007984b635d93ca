"""Inject faults into a service at random, and check that it keeps what it promises.

    python -m benchmarks.chaos.run [--seconds 600] [--streams 4] [--seed 0] [--round 14] [--ray]

A service runs in other processes on loopback, with a small network and a small disk: one process with 128 files, or
with ``--ray`` a service on a Ray cluster of two nodes. Clients send batches to it, each to its own stream, one of them
slowly, with an idempotency key, and again until they are answered. Meanwhile, at random times and on top of each other,
the disk is full, the network raises, clients send nonsense, leave, do not read their answers, or open more connections
than are accepted and send nothing; and the process is killed or stopped and started again, sometimes with room for two
streams in memory only, and sometimes stopped just after it says that it listens. On Ray the process of a shard or the
front is killed, a shard is paused for up to 20 seconds, or the service is stopped. Checked are:

- after a kill every update is there that was acknowledged two snapshot intervals earlier; an update that a full disk
  kept from being written is due two intervals after there is space again. After a stop every update is there;
- every batch counts once, and every answer equals that of a model in this process which saw the accepted batches, bit
  for bit;
- a good request fails only while there is a fault, with status 500 only while the network raises, and 503 only while
  the disk is full or a process is down. A bad request always gets 400. No request hangs, and while one shard is paused,
  the metrics, the readiness and the list of streams are answered.

Needs Linux. As root the disk is a file system of its own; otherwise the size of the files of the process is limited.
"""

import argparse
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import ctta
from benchmarks.chaos.clients import ChaosClient, leave_early, read_nothing, send_bad_request
from benchmarks.chaos.service import INTERVAL, ChaosService, chaos_service

MIN_ROUND = 3.0  # seconds between a start and the next end
FAULTS = (
    "full disk",
    "failing network",
    "bad requests",
    "clients that leave",
    "clients that do not read",
    "silent connections",
)


def run(
    seconds: float, num_streams: int, seed: int, max_round: float, *, on_ray: bool = False
) -> tuple[list[str], Counter[str], dict[str, float]]:
    """Inject faults for a time.

    Returns:
        The problems, what was counted, and the longest times in seconds by what they are of.
    """
    generator, problems, counts = random.Random(seed), list[str](), Counter[str]()
    with TemporaryDirectory() as name, chaos_service(Path(name), on_ray=on_ray) as service:
        is_over, end, pause = threading.Event(), time.monotonic() + seconds, random.Random(seed + 1)
        clients = [
            # The last one takes seconds for each body.
            ChaosClient(
                service, stream, problems, counts, None if stream < num_streams else lambda: pause.uniform(0.02, 0.2)
            )
            for stream in range(num_streams + 1)
        ]
        generators = {fault: random.Random(generator.random()) for fault in FAULTS}

        def end_processes() -> None:
            is_first = True
            while (is_first or time.monotonic() < end) and not problems:
                time.sleep(generator.uniform(MIN_ROUND, max_round))
                service.end_and_start(generator, problems, counts)
                is_first = False
            is_over.set()

        def work(task: Callable[[], None]) -> None:
            try:
                task()
            except Exception as error:
                problems.append("".join(traceback.format_exception(error)))
                is_over.set()

        tasks = [end_processes, *(partial(client.work, is_over) for client in clients)]
        tasks += [partial(inject, fault, service, generators[fault], is_over, problems, counts) for fault in FAULTS]
        with ThreadPoolExecutor(len(tasks)) as pool:
            list(pool.map(work, tasks))
        with service.timeline.during("down"):
            if service.stop(signal.SIGTERM) != 0:
                problems.append("the service could not be stopped")
        for client in clients:
            client.check_saved()
        if problems:
            problems.append((service.folder / "log").read_text()[-4000:])
        counts["silent connections that were closed"] = service.num_closed
    times = {"oldest update dropped by a kill": max(client.oldest_dropped for client in clients)}
    if on_ray:
        times["longest answer while a shard is paused"] = service.longest_wait
    return problems, counts, times


def inject(
    fault: str,
    service: ChaosService,
    generator: random.Random,
    is_over: threading.Event,
    problems: list[str],
    counts: Counter[str],
) -> None:
    """Inject a fault again and again, until the attack is over."""
    actions: dict[str, Callable[[], None]] = {
        "bad requests": lambda: send_bad_request(service, problems, generator),
        "clients that leave": lambda: leave_early(service, generator),
        "clients that do not read": lambda: read_nothing(service, generator),
    }
    faults = {
        "full disk": service.full_disk,
        "failing network": service.failing_network,
        "silent connections": service.silent_connections,
    }
    is_over.wait(generator.uniform(0.1, 2))
    while not is_over.is_set():
        counts[fault] += 1
        if fault in actions:
            actions[fault]()
        else:
            with faults[fault]():
                is_over.wait(generator.uniform(0.2, 2.5))
        is_over.wait(generator.uniform(0.2, 4 if fault in actions else 8))


def main() -> None:
    """Inject faults, and print a summary."""
    parser = argparse.ArgumentParser(description="Inject faults into a service at random.")
    parser.add_argument("--seconds", type=float, default=600, help="duration")
    parser.add_argument("--streams", type=int, default=4, help="streams with a client that is not slow")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    parser.add_argument("--round", type=float, default=14, help="longest time between two kills")
    parser.add_argument("--ray", action="store_true", help="attack a service on a Ray cluster")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    problems, counts, times = run(
        arguments.seconds, arguments.streams, arguments.seed, arguments.round, on_ray=arguments.ray
    )
    place = "on Ray" if arguments.ray else "one process"
    settings = f"{arguments.streams} + 1 streams, {arguments.seconds:g} s, seed {arguments.seed}"
    print(f"ctta {ctta.__version__}, {place}, {settings}, snapshots every {INTERVAL:g} s")
    first = (*FAULTS, "requests", "slow requests", "requests sent again", "updates acknowledged", "updates lost")
    for name in (*first, *sorted(counts.keys() - set(first))):
        print(f"{name:44}{counts[name]:8}")
    for name, seconds in times.items():
        print(f"{name:44}{seconds:.2f} s")
    sys.exit("\n".join(problems) if problems else 0)


if __name__ == "__main__":
    main()
