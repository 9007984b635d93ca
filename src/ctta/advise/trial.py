"""A few methods on a user's pictures: the short form of :func:`ctta.advise`."""

from collections.abc import Sequence
from dataclasses import dataclass

from numpy.typing import ArrayLike
from torch import nn

from ctta.advise.candidates import Candidate
from ctta.advise.input_check import check_input
from ctta.advise.pictures import (
    DEFAULT_CORRUPTIONS,
    DEFAULT_SEVERITY,
    CorruptedPictures,
    ImageSource,
    StreamOrder,
    gather_images,
    label_pictures,
)
from ctta.advise.race import SOURCE, OnProgress
from ctta.core.registry import DEFAULT_METHOD
from ctta.data.corruptions.registry import check_corruption
from ctta.data.datasets.corruptible import CLEAN
from ctta.evaluation import Comparison, evaluate


@dataclass(frozen=True, repr=False)
class MethodTrial:
    """Source and a few methods on the same pictures; printed, it is a table and a line to paste.

    Attributes:
        comparison: The results, by the name of the method.
        reference: What errors are counted against.
        warning: What is wrong with the input of the network; None if nothing is.
    """

    comparison: Comparison
    reference: str
    warning: str | None

    @property
    def best(self) -> str:
        """The best method if it beats Source by more than noise, else ``"source"``."""
        best = self.comparison.best
        lead = None if best == SOURCE.key else self.comparison.difference(best, SOURCE.key)
        return best if lead is not None and lead.high < 0 else SOURCE.key

    @property
    def python(self) -> str:
        """The best method as a line of Python."""
        return f'model = ctta.adapt(net, "{self.best}")'

    def __repr__(self) -> str:
        verdict = ""
        if self.best == SOURCE.key:
            is_short = any(result.interval is None for result in self.comparison.results.values())
            verdict = "No method beats Source by more than noise.\n"
            verdict = "There are too few batches to tell a gain from noise: raise --limit.\n" if is_short else verdict
        return f"{self.comparison!r}\nScored against {self.reference}.\n{verdict}\n{self.python}"


def try_methods(
    net: nn.Module,
    images: ImageSource,
    labels: ArrayLike | None = None,
    *,
    methods: Sequence[str] = ("bn_stats", "tent", "cotta_fast", DEFAULT_METHOD),
    corruptions: Sequence[str] = DEFAULT_CORRUPTIONS,
    severity: float = DEFAULT_SEVERITY,
    batch_size: int = 32,
    order: StreamOrder = "shuffled",
    limit: int | None = 256,
    size: tuple[int, int] | None = None,
    use_labels: bool | None = None,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> MethodTrial:
    """Evaluate Source and a few methods, at their published settings, on a user's pictures under corruptions.

    Args:
        net: The network, for images in [0, 1]; it is never changed.
        images: Clean pictures, as for :func:`ctta.advise`.
        labels: As for :func:`ctta.advise`.
        methods: Names of methods.
        corruptions: The corruptions, one after the other; ``"none"`` for the pictures as they are.
        severity: Their severity.
        batch_size: Images per step.
        order: As for :func:`ctta.advise`.
        limit: Largest number of pictures; None for all.
        size: As for :func:`ctta.advise`.
        use_labels: As for :func:`ctta.advise`.
        seed: Seed of the draws.
        on_progress: Called with the number of batches that are done and that there are.

    Returns:
        The results.
    """
    steps = [(name, 0.0 if name == CLEAN else check_corruption(name, severity)) for name in corruptions]
    candidates = [SOURCE, *(Candidate(name) for name in dict.fromkeys(methods) if name != SOURCE.key)]
    clean = gather_images(images, labels, size=size, limit=limit, seed=seed)
    pictures = label_pictures(net, clean, use_labels=use_labels, seed=seed)
    found = check_input(net, pictures)
    stream = CorruptedPictures(pictures).build_stream(steps, batch_size=batch_size, order=order, seed=seed)
    total, done = len(stream) * len(candidates), 0

    def count(_record: object) -> None:
        nonlocal done
        done += 1
        if on_progress:
            on_progress(done, total)

    results = {each.key: evaluate(each.build(net), stream, name=each.key, on_batch=count) for each in candidates}
    return MethodTrial(Comparison(results), pictures.reference, found.describe() if found.expected else None)
