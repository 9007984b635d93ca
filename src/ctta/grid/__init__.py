"""Many cells (methods x orders x seeds), on local processes or on Ray, resumable."""

from ctta.grid.cell import Cell
from ctta.grid.examples import keep_examples
from ctta.grid.on_ray import RayCluster
from ctta.grid.places import Ending, Place, ThisProcess
from ctta.grid.processes import Processes
from ctta.grid.run import Progress, Run, execute, plan

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
