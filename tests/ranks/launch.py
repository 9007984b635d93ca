"""Start the ranks of a world, and collect the outcomes of their cases."""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ranks import load_cases, outcomes_path, read_outcomes

TESTS = Path(__file__).parent.parent
#: Gloo connects over the loopback interface only, and one thread per rank is enough.
ENVIRONMENT = os.environ | {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
}
TIMEOUT = 600  # seconds; a world that hangs is a failure, on however busy a machine

#: The two worlds. If a rank is killed under torchrun, torchrun ends the others, so that they cannot notice it.
_CASES = {name: check.__module__ for name, check in load_cases().items()}
_OF_HOST = [name for name, module in _CASES.items() if module != "ranks.devices"]
TORCHRUN_CASES = [name for name in _OF_HOST if name != "a_killed_rank_ends_the_others_with_an_error"]
PROCESS_CASES = [name for name in _OF_HOST if name != "commands_print_on_rank_zero_only"]
#: Those of ranks with a simulated accelerator each; the others repeat the streams of all methods there.
DEVICE_CASES = [
    *(name for name, module in _CASES.items() if module == "ranks.devices"),
    *(
        f"equals_single_process_{name}"
        for name in ("tent_batch_norm", "cotta_vit", "vane_batch_norm", "pea_vit", "views_vit")
    ),
    *("a_rank_without_rows_contributes_nothing", "a_bad_batch_on_one_rank_is_refused_by_all"),
    *("all_start_from_the_state_of_rank_zero", "commands_print_on_rank_zero_only"),
]
OTHER_DEVICE_CASES = [name for name in _OF_HOST if "equals_single" in name and name not in DEVICE_CASES]


@dataclass(frozen=True)
class World:
    """Ranks that have run their cases.

    Attributes:
        folder: The folder that they shared.
        exit_codes: Exit code of each rank.
    """

    folder: Path
    exit_codes: list[int]

    def check(self, name: str) -> None:
        """Fail unless a case has passed on every rank."""
        num_ranks = len(self.exit_codes)
        for number in range(num_ranks):
            outcomes = read_outcomes(outcomes_path(self.folder, num_ranks, number))
            if name not in outcomes:
                last = next(reversed(outcomes), "none")
                pytest.fail(f"rank {number} of {num_ranks} did not come to this case; its last one was {last}")
            if outcomes[name]:
                pytest.fail(f"rank {number} of {num_ranks}:\n{outcomes[name]}")


def run_with_torchrun(num_ranks: int, folder: Path, cases: list[str], device: str = "cpu") -> World:
    """Run cases as a user would."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    completed = subprocess.run(
        [*launcher, "-m", "ranks", str(folder), *cases],
        env=ENVIRONMENT | {"CTTA_RANKS_DEVICE": device},
        timeout=TIMEOUT,
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr
    return World(folder, [0] * num_ranks)


def run_processes(num_ranks: int, folder: Path) -> World:
    """Run the cases on processes started as torchrun would, but with nobody to end them all when one is lost."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "ranks", str(folder), *PROCESS_CASES],
            env=ENVIRONMENT | world | {"RANK": str(number), "LOCAL_RANK": str(number)},
        )
        for number in range(num_ranks)
    ]
    try:
        return World(folder, [process.wait(TIMEOUT) for process in processes])
    finally:
        for process in processes:
            process.kill()
