"""``ctta bench``: run a benchmark."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import typer

from ctta import benchmark
from ctta.benchmark import RunOptions
from ctta.benchmark.matrix import MATRIX
from ctta.benchmark.plan import describe_left_out
from ctta.cli.console import exit_on_interrupt, interrupt_between_steps, print_notice, progress_bar
from ctta.cli.options import command
from ctta.cli.results import exit_on_failures, print_failure, print_matrix, print_results


@command
def bench(
    *,
    recipe: Annotated[
        str,
        typer.Argument(
            help="Run this benchmark, such as embedded; for a list see: ctta recipes. matrix runs methods on many "
            "protocols, about an hour of one core with the default ones.",
            metavar="RECIPE",
        ),
    ],
    options: RunOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per cell instead of tables.")] = False,
) -> None:
    """Run methods over a benchmark stream and write the results as a resumable run folder.

    After a kill or Ctrl-C, run the same command again to resume: the results
    are identical to those of an uninterrupted run.
    """
    with _execute(recipe, options) as callbacks:
        keywords = vars(options) | callbacks | {"command": shlex.join(["ctta", *sys.argv[1:]])}
        result = benchmark.run_matrix(**keywords) if recipe == MATRIX else benchmark.run(recipe, **keywords)
    if isinstance(result, benchmark.MatrixResult):
        print_matrix(result, as_json=as_json)
    else:
        print_results(result, as_json=as_json)
    exit_on_failures([result])


@contextmanager
def _execute(title: str, options: RunOptions) -> Iterator[dict[str, Any]]:
    """Show the progress within the block, and let Ctrl-C end it after a step where cells run in this process.

    Args:
        title: Shown in front of the progress.
        options: Where cells run.

    Yields:
        What runs the cells in this process, None if something else does, and what is called meanwhile, as keywords of
        :func:`ctta.benchmark.run`.
    """
    with ExitStack() as stack:
        stack.enter_context(exit_on_interrupt())
        update = stack.enter_context(progress_bar(title))
        is_serial = not options.workers and options.ray is None
        checks: list[Callable[[], None]] = []

        def start(run: benchmark.BenchmarkRun) -> None:
            if line := describe_left_out(run.left_out):
                print_notice(line)
            if is_serial:  # only now: before the first batch, Ctrl-C stops what a recipe measures at once
                checks.append(stack.enter_context(interrupt_between_steps()))

        executor = benchmark.SerialExecutor(lambda _record: checks[0]()) if is_serial else None
        yield {"executor": executor, "on_plan": start, "on_progress": update, "on_outcome": print_failure}
