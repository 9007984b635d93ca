"""Benchmarks: recipes, and resumable runs of their cells (method x order x seed) on local processes or Ray.

:func:`run` does everything: plan, run and report. :func:`run_matrix` does it for many protocols at once.
"""

from ctta.benchmark.detection import DetectionResult, run_detection_benchmark
from ctta.benchmark.executors import Executor, JobOutcome, ProcessExecutor, RayExecutor, SerialExecutor, execute
from ctta.benchmark.matrix import MatrixResult, run_matrix
from ctta.benchmark.options import BenchmarkOptions
from ctta.benchmark.plan import BenchmarkCell, BenchmarkRun, plan
from ctta.benchmark.recipes import RECIPES, BenchmarkTask, MethodSpec, build_task
from ctta.benchmark.run import BenchmarkResult, RunOptions, run

__all__ = [
    "RECIPES",
    "BenchmarkCell",
    "BenchmarkOptions",
    "BenchmarkResult",
    "BenchmarkRun",
    "BenchmarkTask",
    "DetectionResult",
    "Executor",
    "JobOutcome",
    "MatrixResult",
    "MethodSpec",
    "ProcessExecutor",
    "RayExecutor",
    "RunOptions",
    "SerialExecutor",
    "build_task",
    "execute",
    "plan",
    "run",
    "run_detection_benchmark",
    "run_matrix",
]
