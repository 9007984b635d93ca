"""Settings of CoTTA for one's own network, chosen on source images under corruptions that no benchmark scores.

The threshold follows the authors' rule. The learning rate and the restore probability are tried out on a stream of the
four hold-out corruptions. A setting counts as better only if the images on which two differ say so beyond chance.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ctta.advise.threshold import calibrate_threshold
from ctta.base import AdaptiveModel
from ctta.corruptions import HOLD_OUT, corrupt
from ctta.datasets.clean_images import CleanImages
from ctta.errors import annotate_network_errors
from ctta.methods import BNStats, CoTTA, Source
from ctta.views import image_views

LEARNING_RATES = (1e-3, 3e-3, 3e-4, 1e-4)  # of Adam; the first is CoTTA's default
RESTORES = (0.01, 0.001, 0.0)  # likewise
SEVERITY = 5
CLEARLY = 2.0  # standard errors


@dataclass(frozen=True)
class Trial:
    """One method with its settings on the whole stream: which images it got wrong, (passes, images)."""

    method: str
    wrong: Tensor
    learning_rate: float | None = None
    restore: float | None = None

    @property
    def error(self) -> float:
        """Share of wrong predictions."""
        return float(self.wrong.double().mean())

    def is_clearly_better_than(self, other: "Trial") -> bool:
        """Beyond chance, by the images on which the two differ; an image counts once, however often it was shown.

        >>> trial = Trial("Source", torch.arange(100).expand(4, 100) < 10)
        >>> [Trial("CoTTA", torch.arange(100).expand(4, 100) < n).is_clearly_better_than(trial) for n in (6, 2)]
        [False, True]
        """
        gained = (other.wrong.long() - self.wrong.long()).sum(0).double()  # of each image
        return float(gained.sum()) > CLEARLY * float(gained.square().sum().sqrt())


class Tuning:
    """Tries settings out; what is found so far can be asked for at any time.

    Args:
        net: the source network, taking images in [0, 1].
        clean: source images; with labels, errors are counted against these, else against the network's own answers on
            the clean images.
        use_labels: True insists on labels, False ignores them; None takes them where they can be the network's
            classes: folders of pictures may also be days or cameras, so there must be as many as classes.
        batch_size: images per step.
        num_views: of CoTTA; few, because there are many settings to try.
        num_rounds: how often a trial goes through the four corruptions; learning needs a long stream to show.
        seed: of the corruptions and of CoTTA.
    """

    def __init__(
        self,
        net: nn.Module,
        clean: CleanImages,
        *,
        use_labels: bool | None = None,
        batch_size: int = 50,
        num_views: int = 8,
        num_rounds: int = 1,
        seed: int = 0,
    ) -> None:
        self.net, self.batch_size, self.num_views, self.seed = net, batch_size, num_views, seed
        self.images, self.num_images, self.num_rounds = clean.images, len(clean.images), num_rounds
        self.reference = next(iter(net.parameters()), torch.empty(0))
        source = Source(net)
        logits = torch.cat([self._logits(source, x) for x in self._clean_batches()])
        if logits.ndim != 2:
            raise ValueError(f"expected one class per image, and the network's logits are {tuple(logits.shape)}")
        predicted = logits.argmax(1)
        labels = _labels_of(clean, logits.shape[1], use_labels)
        self.has_labels = labels is not None
        self.labels = predicted if labels is None else torch.from_numpy(labels)
        self.clean_error = float((predicted != self.labels).double().mean()) if self.has_labels else None
        # Rounded to what the line of Python will say, so that what is tried is what is pasted.
        self.threshold = round(calibrate_threshold(net, self._clean_batches()), 3)
        self._corrupted: dict[tuple[str, int], NDArray[np.uint8]] = {}  # made once, by the first trial
        self.trials: list[Trial] = []

    @property
    def num_trials(self) -> int:
        """Of a whole search."""
        return 2 + len(LEARNING_RATES) * len(RESTORES)

    @property
    def num_steps(self) -> int:
        """Of one trial."""
        return self.num_rounds * len(HOLD_OUT) * math.ceil(self.num_images / self.batch_size)

    def run(self, *, seconds: float | None = None, on_step: Callable[[int, int], None] | None = None) -> None:
        """Try everything, or as much as there is time for; at least the two yardsticks.

        Args:
            seconds: when to stop; a trial that is not finished then does not count.
            on_step: called with how many batches are done and how many there are.
        """
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        total = self.num_trials * self.num_steps
        for number, (trial, model) in enumerate(self._candidates()):
            wrong = []
            for step, (x, y) in enumerate(self._stream()):
                if number >= 2 and time.monotonic() > deadline:
                    return
                logits = self._logits(model, x)
                wrong.append((logits.argmax(1) != y) | ~logits.isfinite().all(1))
                if on_step:
                    on_step(number * self.num_steps + step + 1, total)
            self.trials.append(trial(torch.cat(wrong).view(-1, self.num_images)))

    @property
    def yardsticks(self) -> list[Trial]:
        """Source and BN Stats."""
        return self.trials[:2]

    @property
    def best(self) -> Trial | None:
        """CoTTA as it should be set: its defaults, unless others are clearly better; None before any was tried."""
        if len(self.trials) < 3:
            return None
        default, *others = self.trials[2:]
        lowest = min(others, key=lambda trial: trial.error, default=default)
        return lowest if lowest.is_clearly_better_than(default) else default

    @property
    def recommended(self) -> Trial:
        """The simplest of Source, BN Stats and the best CoTTA that none of the others is clearly better than."""
        chosen, *others = [*self.yardsticks, *([self.best] if self.best else [])]
        for other in others:
            chosen = other if other.is_clearly_better_than(chosen) else chosen
        return chosen

    def python(self, trial: Trial) -> str:
        """A tried model as a line to paste."""
        if trial.learning_rate is None:
            return "model = ctta.Source(net)" if trial.method == "Source" else "model = ctta.BNStats(net)"
        return (
            f"model = ctta.CoTTA(net, threshold={self.threshold}, "
            f"optimizer=partial(torch.optim.Adam, lr={trial.learning_rate:g}), restore={trial.restore}, "
            f"views=ctta.views.image_views({self.num_views}))"
        )

    def _candidates(self) -> Iterator[tuple[Callable[[Tensor], Trial], AdaptiveModel]]:
        yield partial(Trial, "Source"), Source(self.net)
        yield partial(Trial, "BN Stats"), BNStats(self.net)
        for learning_rate in LEARNING_RATES:
            for restore in RESTORES:
                model = CoTTA(
                    self.net,
                    threshold=self.threshold,
                    optimizer=partial(torch.optim.Adam, lr=learning_rate),
                    restore=restore,
                    views=image_views(self.num_views),
                    seed=self.seed,
                )
                yield partial(Trial, "CoTTA", learning_rate=learning_rate, restore=restore), model

    def _stream(self) -> Iterator[tuple[Tensor, Tensor]]:
        for name in tuple(HOLD_OUT) * self.num_rounds:
            for number, labels in enumerate(self.labels.split(self.batch_size)):
                rows = np.arange(self.num_images)[number * self.batch_size :][: self.batch_size]
                if (name, number) not in self._corrupted:
                    self._corrupted[name, number] = corrupt(
                        self.images[rows], name, SEVERITY, seed=self.seed, index=rows
                    )
                yield self._floats(self._corrupted[name, number]), labels

    def _clean_batches(self) -> Iterator[Tensor]:
        for start in range(0, self.num_images, self.batch_size):
            yield self._floats(self.images[start : start + self.batch_size])

    def _floats(self, pixels: NDArray[np.uint8]) -> Tensor:
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).div(255).to(self.reference)

    @staticmethod
    def _logits(model: AdaptiveModel, x: Tensor) -> Tensor:
        with annotate_network_errors(x):
            logits: Tensor = model(x)
        return logits.cpu()


def _labels_of(clean: CleanImages, num_classes: int, use_labels: bool | None) -> NDArray[np.int64] | None:
    labels, folders = clean.labels, clean.num_folders
    if use_labels is False:
        return None
    if labels is None:
        if use_labels:
            raise ValueError("these images have no labels; expected a tree <class>/<picture>, or an .npz with 'labels'")
        return None
    if folders is not None and folders != num_classes:
        if use_labels:
            raise ValueError(f"the pictures lie in {folders} folders, and the network has {num_classes} classes")
        return None
    if not 0 <= labels.min() <= labels.max() < num_classes:
        raise ValueError(
            f"labels run from {labels.min()} to {labels.max()}, and the network has {num_classes} classes: "
            "is this the network for these images?"
        )
    return labels
