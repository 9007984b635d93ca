"""Cells on a Ray cluster; every node must see the run's folder and have ctta installed."""

import logging
from typing import Any

from ctta.benchmark.cell import Cell
from ctta.benchmark.executors import Ending, attempt


class RayCluster:
    """Each cell as a Ray task.

    Args:
        address: of a running cluster, ``"auto"`` to find one, None to start one on this machine.
        threads: per cell, which Ray counts as so many CPUs.
        device: a cell on CUDA gets a GPU to itself.
    """

    def __init__(self, address: str | None, threads: int, device: str = "cpu") -> None:
        try:
            import ray
        except ImportError as error:
            raise ImportError("cells on a cluster need Ray: pip install 'ctta[ray]'") from error
        self._ray: Any = ray
        self._ray.init(
            address=address,
            include_dashboard=False if address is None else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        needs = {"CPU": threads, "GPU": int(device.startswith("cuda"))}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        fitting = [min(int(node.get(kind, 0) // count) for kind, count in needs.items() if count) for node in nodes]
        self.size = sum(fitting)
        if self.size == 0:
            self._ray.shutdown()
            raise ValueError(f"no node of the cluster has {needs}, which each cell needs: give fewer --threads")
        # Retries are ours, the same as in other places, so that each one is reported.
        self._task = self._ray.remote(num_cpus=threads, num_gpus=needs["GPU"], max_retries=0)(attempt)
        self._running: dict[Any, Cell] = {}

    def start(self, cell: Cell) -> None:
        self._running[self._task.remote(cell)] = cell

    def next_ending(self) -> Ending:
        (done,), _ = self._ray.wait(list(self._running), num_returns=1)
        cell = self._running.pop(done)
        try:
            return Ending(cell, self._ray.get(done))
        except self._ray.exceptions.RayError as error:
            return Ending(cell, str(error).splitlines()[0], died=True)

    def stop(self) -> None:
        for task in self._running:
            self._ray.cancel(task, force=True)
        self._ray.shutdown()
