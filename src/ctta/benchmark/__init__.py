"""Benchmarks: recipes, and resumable runs of their cells (method x order x seed) on local processes or Ray.

:func:`run` does everything: plan, run and report. :func:`run_matrix` does it for many protocols at once.
"""

from ctta.benchmark.cells import BenchmarkCell
from ctta.benchmark.execution import execute
from ctta.benchmark.executors import Executor, JobOutcome, ProcessExecutor, SerialExecutor
from ctta.benchmark.matrix import MatrixResult, run_matrix
from ctta.benchmark.plan import BenchmarkRun, plan
from ctta.benchmark.ray import RayExecutor
from ctta.benchmark.recipes import RECIPES, BenchmarkOptions, BenchmarkTask, MethodSpec, build_task
from ctta.benchmark.run import BenchmarkResult, run

__all__ = [
    "RECIPES",
    "BenchmarkCell",
    "BenchmarkOptions",
    "BenchmarkResult",
    "BenchmarkRun",
    "BenchmarkTask",
    "Executor",
    "JobOutcome",
    "MatrixResult",
    "MethodSpec",
    "ProcessExecutor",
    "RayExecutor",
    "SerialExecutor",
    "build_task",
    "execute",
    "plan",
    "run",
    "run_matrix",
]
