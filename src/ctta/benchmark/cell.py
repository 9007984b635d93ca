"""One cell of a table: a method, an order and a seed, described in plain words so that any process can run it."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from ctta.benchmark.recipes import Options, build
from ctta.distributed import data_parallel, init, rank
from ctta.evaluation.evaluate import evaluate
from ctta.evaluation.results import BatchRecord, read_result
from ctta.models import to_device


@dataclass(frozen=True)
class Cell:
    """All that its result depends on, and where that goes."""

    recipe: str
    options: Options
    row: str
    order: int | None
    seed: int | None  # None for a method without randomness
    threads: int
    folder: str
    save_every: float = 20.0  # seconds

    @property
    def name(self) -> str:
        return Path(self.folder).name

    @property
    def is_complete(self) -> bool:
        folder = Path(self.folder)
        return (folder / "about.json").exists() and read_result(folder).is_complete

    def run(self, on_batch: Callable[[BatchRecord], None] | None = None) -> None:
        """Evaluate, or go on with it; the result is in the folder. Under ``torchrun`` the ranks divide each batch."""
        from filelock import FileLock

        torch.set_num_threads(self.threads)
        task = build(self.recipe, self.options)
        row, folder = task.rows[self.row], Path(self.folder)
        init()
        with ExitStack() as held:
            if rank() == 0:
                folder.mkdir(parents=True, exist_ok=True)
                # An attempt that was given up may still be at it, on another machine.
                held.enter_context(FileLock(folder / "lock"))
            model = data_parallel(row.model(to_device(task.network(), self.options.device), self.seed or 0))
            evaluate(
                model,
                task.stream(self.order),
                reset_at_domain=row.reset_at_domain,
                folder=folder,
                save_every=self.save_every,
                name=row.label,
                labels={
                    "recipe": self.recipe,
                    "row": self.row,
                    "order": self.order,
                    "seed": self.seed,
                    "changed": self.options.changes,
                },
                on_batch=on_batch,
            )
