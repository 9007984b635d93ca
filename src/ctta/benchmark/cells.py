"""A cell of a benchmark: one method, one order and one seed, described so that any process can run it."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch

from ctta.benchmark.recipes import BenchmarkOptions, build_task
from ctta.core.model import AdaptiveModel
from ctta.data.streams import Stream, parse_protocol
from ctta.distributed import data_parallel, init, rank
from ctta.evaluation.journal import read_result
from ctta.evaluation.loop import evaluate
from ctta.evaluation.passes import count_step_ratio, whole_ratio
from ctta.evaluation.results import BatchRecord
from ctta.models import to_device


@dataclass(frozen=True)
class BenchmarkCell:
    """Everything that the result of a cell depends on, and the folder that the result is written to.

    Attributes:
        recipe: Name of the recipe.
        options: What the user changed about the recipe.
        method: Name of the method in the recipe, or in :mod:`ctta.core.registry`.
        order: Number of the order of domains, None for the standard order.
        seed: Seed of the method, None for a method without randomness.
        threads: CPU threads of torch.
        folder: Folder of the result, see :func:`ctta.evaluate`.
        save_every: Seconds between two saves of the state.
    """

    recipe: str
    options: BenchmarkOptions
    method: str
    order: int | None
    seed: int | None
    threads: int
    folder: str
    save_every: float = 20.0

    @property
    def name(self) -> str:
        """The name of the cell's folder, such as ``cotta-standard-seed1``."""
        return Path(self.folder).name

    @property
    def is_complete(self) -> bool:
        """Whether the folder holds the result of the whole stream."""
        folder = Path(self.folder)
        return (folder / "about.json").exists() and read_result(folder).is_complete

    def to_json(self) -> str:
        """Return the cell as JSON, for another process."""
        return json.dumps(asdict(self) | {"options": self.options.to_dict()})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the cell that :meth:`to_json` has written.

        Args:
            text: The JSON.

        Returns:
            An equal cell.
        """
        fields = json.loads(text)
        options = fields.pop("options")
        return cls(**fields, options=BenchmarkOptions.from_dict(options))

    def run(self, on_batch: Callable[[BatchRecord], None] | None = None) -> None:
        """Evaluate the cell, or resume it, and write the result to the folder.

        Under ``torchrun`` the ranks share each batch, and rank 0 writes the folder.

        Args:
            on_batch: Called after each batch; the state is saved before an exception of it propagates.
        """
        try:
            from filelock import FileLock
        except ImportError as error:
            raise ImportError("benchmarks need the extra 'bench': pip install 'ctta[bench]'") from error
        task = build_task(self.recipe, self.options, [self.method], ignore_other_settings=True)
        spec, folder = task.methods[self.method], Path(self.folder)
        init()
        with ExitStack() as stack:
            stack.enter_context(_num_threads(self.threads))
            if rank() == 0:
                folder.mkdir(parents=True, exist_ok=True)
                # An attempt that was given up may still be running on another machine.
                stack.enter_context(FileLock(folder / "lock"))
            net = to_device(task.make_network(), self.options.device)
            model, stream = data_parallel(spec.build_model(net, self.seed or 0)), task.make_stream(self.order)
            evaluate(
                model,
                stream,
                reset_at_domain=spec.reset_at_domain,
                step_ratio=self._find_step_ratio(model, stream),
                folder=folder,
                save_every=self.save_every,
                name=spec.label,
                labels={
                    "recipe": self.recipe,
                    "row": self.method,
                    "order": self.order,
                    "seed": self.seed,
                    "changed": self.options.changes,
                },
                on_batch=on_batch,
            )

    def _find_step_ratio(self, model: AdaptiveModel, stream: Stream) -> int:
        """Return every how many batches the model learns; 1 for a protocol that waits for every step."""
        protocol = None if self.options.protocol is None else parse_protocol(self.options.protocol)
        if protocol is None or protocol.definition.waits:
            return 1
        ratio, speed = protocol.all_settings["ratio"], float(protocol.all_settings["speed"])
        return whole_ratio((count_step_ratio(model, stream) if ratio is None else ratio) * speed)


@contextmanager
def _num_threads(threads: int) -> Iterator[None]:
    """Let torch use this many CPU threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
