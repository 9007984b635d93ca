"""Many cells (methods x orders x seeds), on local processes or on Ray, resumable."""

from ctta.benchmark.cell import Cell
from ctta.benchmark.examples import keep_examples
from ctta.benchmark.executors import Ending, Place, ThisProcess
from ctta.benchmark.processes import Processes
from ctta.benchmark.ray import RayCluster
from ctta.benchmark.run import Progress, Run, execute, plan

__all__ = [
    "Cell",
    "Ending",
    "Place",
    "Processes",
    "Progress",
    "RayCluster",
    "Run",
    "ThisProcess",
    "execute",
    "keep_examples",
    "plan",
]
