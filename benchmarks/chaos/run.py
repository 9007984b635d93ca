"""Inject faults into a service at random, and check that it keeps what it promises.

    python -m benchmarks.chaos.run [--seconds 600] [--streams 4] [--seed 0] [--round 14]

A service runs in another process on loopback, with a small network and a small disk. Clients send batches to it, each
to its own stream, one of them slowly. Meanwhile, at random times and on top of each other, the disk is full, the
network raises, clients send nonsense, leave, or do not read their answers; and the process is killed or stopped and
started again, sometimes with room for two streams in memory only. Checked are:

- after a kill every update is there that was acknowledged two snapshot intervals earlier; an update that a full disk
  kept from being written is due two intervals after there is space again. After a stop every update is there;
- every answer equals that of a model in this process which saw the accepted batches, bit for bit;
- a good request fails only while there is a fault, with status 500 only while the network raises, and 503 only while
  the disk is full or the service stops. A bad request always gets 400. No request hangs.

Needs Linux. As root the disk is a file system of its own; otherwise the size of the files of the process is limited.
"""

import argparse
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import ctta
from benchmarks.chaos.clients import ChaosClient, leave_early, read_nothing, send_bad_request
from benchmarks.chaos.service import INTERVAL, ChaosService, chaos_service

MIN_ROUND = 3.0  # seconds between a start and the next end
MAX_LIVE = (2, 64)  # streams in memory, one of these after each start
STOP_PROBABILITY = 0.2  # of a round that ends with SIGTERM and not with a kill
FAULTS = ("full disk", "failing network", "bad requests", "clients that leave", "clients that do not read")


def run(seconds: float, num_streams: int, seed: int, max_round: float) -> tuple[list[str], Counter[str], float]:
    """Inject faults for a time.

    Returns:
        The problems, what was counted, and the age of the oldest update that a kill dropped, in seconds.
    """
    generator, problems, counts = random.Random(seed), list[str](), Counter[str]()
    with TemporaryDirectory() as name, chaos_service(Path(name)) as service:
        end = time.monotonic() + seconds
        pause = random.Random(seed + 1)
        clients = [
            # The last one takes seconds for each body.
            ChaosClient(
                service, stream, problems, counts, None if stream < num_streams else lambda: pause.uniform(0.02, 0.2)
            )
            for stream in range(num_streams + 1)
        ]
        is_first = True
        while (is_first or time.monotonic() < end) and not problems:
            run_round(service, clients, generator, problems, counts, max_round, is_first=is_first)
            is_first = False
        with service.timeline.during("stopping"):
            if service.stop(signal.SIGTERM) != 0:
                problems.append("the service could not be stopped")
        if problems:
            problems.append((service.folder / "log").read_text()[-4000:])
    return problems, counts, max(client.oldest_dropped for client in clients)


def run_round(
    service: ChaosService,
    clients: list[ChaosClient],
    generator: random.Random,
    problems: list[str],
    counts: Counter[str],
    max_round: float,
    *,
    is_first: bool,
) -> None:
    """Let clients and faults run until the process is killed or stopped at a random time, start it again, and check."""
    is_over = threading.Event()
    workers = [threading.Thread(target=client.work) for client in clients]
    workers += [
        threading.Thread(
            target=inject, args=(fault, service, random.Random(generator.random()), is_over, problems, counts)
        )
        for fault in FAULTS
    ]
    for worker in workers:
        worker.start()
    time.sleep(generator.uniform(MIN_ROUND, max_round))
    is_kill = is_first or generator.random() >= STOP_PROBABILITY
    if is_kill:
        code = service.stop(signal.SIGKILL)
        counts["kill -9"] += 1
        if code != -signal.SIGKILL:
            problems.append(f"the service had ended by itself, with exit code {code}")
    else:
        with service.timeline.during("stopping"):
            code = service.stop(signal.SIGTERM)
        counts["SIGTERM"] += 1
    ended_at = service.ended_at
    was_full = service.timeline.was_on("full disk", ended_at, time.monotonic())
    if not is_kill and code != 0 and not was_full:
        problems.append(f"exit code {code} after SIGTERM")
    is_over.set()
    for worker in workers:
        worker.join()
    service.start(generator.choice(MAX_LIVE))
    for client in clients:
        client.check_restart(ended_at, is_saved=not is_kill and code == 0)


def inject(
    fault: str,
    service: ChaosService,
    generator: random.Random,
    is_over: threading.Event,
    problems: list[str],
    counts: Counter[str],
) -> None:
    """Inject a fault again and again, until the process has ended."""
    actions: dict[str, Callable[[], None]] = {
        "bad requests": lambda: send_bad_request(service, problems, generator),
        "clients that leave": lambda: leave_early(service, generator),
        "clients that do not read": lambda: read_nothing(service, generator),
    }
    is_over.wait(generator.uniform(0.1, 2))
    while not is_over.is_set() and service.ended_at == float("inf"):
        counts[fault] += 1
        if fault in actions:
            actions[fault]()
        else:
            with service.full_disk() if fault == "full disk" else service.failing_network():
                is_over.wait(generator.uniform(0.2, 2.5))
        is_over.wait(generator.uniform(0.2, 4 if fault in actions else 8))


def main() -> None:
    """Inject faults, and print a summary."""
    parser = argparse.ArgumentParser(description="Inject faults into a service at random.")
    parser.add_argument("--seconds", type=float, default=600, help="duration")
    parser.add_argument("--streams", type=int, default=4, help="streams with a client that is not slow")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    parser.add_argument("--round", type=float, default=14, help="longest time between two kills")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    problems, counts, oldest = run(arguments.seconds, arguments.streams, arguments.seed, arguments.round)
    print(f"ctta {ctta.__version__}, {arguments.streams} + 1 streams, {arguments.seconds:g} s, seed {arguments.seed}")
    first = ("kill -9", "SIGTERM", *FAULTS, "requests", "slow requests", "updates acknowledged", "updates lost")
    for name in (*first, *sorted(counts.keys() - set(first))):
        print(f"{name:34}{counts[name]:8}")
    print(f"oldest update dropped by a kill: {oldest:.2f} s after its acknowledgment, of {2 * INTERVAL:g} s allowed")
    sys.exit("\n".join(problems) if problems else 0)


if __name__ == "__main__":
    main()
