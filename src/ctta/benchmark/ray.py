"""Cells on a Ray cluster; every node must see the run folder and have ctta installed."""

import logging
from typing import Any

from ctta.benchmark.cells import BenchmarkCell
from ctta.benchmark.executors import JobOutcome, run_cell
from ctta.errors import ConfigError


class RayExecutor:
    """Runs each cell as a Ray task.

    Args:
        address: Address of a running cluster, ``"auto"`` to find one, None to start one on this machine.
        threads: CPU threads per cell, which Ray counts as CPUs.
        device: Device of the networks; a cell on CUDA gets a GPU of its own.

    Raises:
        ConfigError: No node of the cluster has enough CPUs or a GPU.
    """

    def __init__(self, address: str | None, threads: int, device: str = "cpu") -> None:
        try:
            import ray
        except ImportError as error:
            raise ImportError("benchmarks on a cluster need the extra 'ray': pip install 'ctta[ray]'") from error
        self._ray: Any = ray
        self._ray.init(
            address=address,
            include_dashboard=False if address is None else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        needs = {"CPU": threads, "GPU": int(device.startswith("cuda"))}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        slots = [min(int(node.get(kind, 0) // count) for kind, count in needs.items() if count) for node in nodes]
        self.num_slots = sum(slots)
        if self.num_slots == 0:
            self._ray.shutdown()
            raise ConfigError(f"each cell needs {needs}, which no node of the cluster has: use fewer threads")
        # Retries are those of ctta.benchmark.execute, as with every executor, so that each one is reported.
        self._task = self._ray.remote(num_cpus=threads, num_gpus=needs["GPU"], max_retries=0)(run_cell)
        self._running: dict[Any, BenchmarkCell] = {}

    def submit(self, cell: BenchmarkCell) -> None:
        """Start the task of a cell.

        Args:
            cell: The cell.
        """
        self._running[self._task.remote(cell)] = cell

    def next_outcome(self) -> JobOutcome:
        """Wait until one of the tasks has ended, and return its outcome."""
        (done,), _ = self._ray.wait(list(self._running), num_returns=1)
        cell = self._running.pop(done)
        try:
            return JobOutcome(cell, self._ray.get(done))
        except self._ray.exceptions.RayError as error:
            return JobOutcome(cell, str(error).splitlines()[0], process_died=True)

    def shutdown(self) -> None:
        """Cancel all running tasks and disconnect from the cluster."""
        for task in self._running:
            self._ray.cancel(task, force=True)
        self._ray.shutdown()
