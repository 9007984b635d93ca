"""Search CoTTA's settings for a network, on source images under corruptions that no benchmark scores.

The threshold follows the rule of the reference implementation. The learning rate and the restore probability are
searched on a stream of the four hold-out corruptions. A candidate replaces the defaults, and CoTTA replaces a baseline,
only if it is significantly better on the images on which the two differ.
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
from ctta.errors import ConfigError, DataError
from ctta.methods import BNStats, CoTTA, Source
from ctta.views import image_views

LEARNING_RATES = (1e-3, 3e-3, 3e-4, 1e-4)  # of Adam; the first is CoTTA's default
RESTORES = (0.01, 0.001, 0.0)  # the first is CoTTA's default
NUM_BASELINES = 2
SEVERITY = 5
SIGNIFICANCE = 2.0  # standard errors


@dataclass(frozen=True)
class Trial:
    """One method with its settings on the whole stream.

    Attributes:
        method: Name of the method.
        wrong: Which predictions were wrong, (passes, images).
        learning_rate: Learning rate of CoTTA; None for a baseline.
        restore: Restore probability of CoTTA; None for a baseline.
    """

    method: str
    wrong: Tensor
    learning_rate: float | None = None
    restore: float | None = None

    @property
    def error(self) -> float:
        """Fraction of wrong predictions."""
        return float(self.wrong.double().mean())

    def is_significantly_better_than(self, other: "Trial") -> bool:
        """Return whether the error is lower by more than two standard errors.

        The difference is taken per image, summed over the passes, because the passes of one image are not independent.

        Args:
            other: Trial on the same stream.

        Returns:
            Whether this trial is better beyond chance.

        >>> trial = Trial("Source", torch.arange(100).expand(4, 100) < 10)
        >>> [Trial("CoTTA", torch.arange(100).expand(4, 100) < n).is_significantly_better_than(trial) for n in (6, 2)]
        [False, True]
        """
        gain = (other.wrong.long() - self.wrong.long()).sum(0).double()  # of each image
        return float(gain.sum()) > SIGNIFICANCE * float(gain.square().sum().sqrt())


class Tuner:
    """Search of CoTTA's settings, whose results are available at any time.

    Args:
        net: Source network, taking images in [0, 1].
        clean: Source images. With labels, errors are counted against these, else against the network's predictions on
            the clean images.
        use_labels: True requires labels, False ignores them. None uses them if they can be the network's classes:
            subfolders may also be days or cameras, so there must be as many as classes.
        batch_size: Images per step.
        num_views: Augmented views in CoTTA; few, because there are many settings to try.
        num_rounds: Passes over the four corruptions per trial; the effect of learning shows on long streams only.
        seed: Random seed of the corruptions and of CoTTA.

    Attributes:
        trials: Finished trials: the baselines, then the candidates.
        threshold: CoTTA's threshold for the network.
        has_labels: Whether errors are counted against labels.
        clean_error: Error on the clean images; None without labels.
        num_images: Number of source images.
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
        # Images are moved to the device and dtype of this tensor.
        self.reference = next(iter(net.parameters()), torch.empty(0))
        source = Source(net)
        logits = torch.cat([source(x).cpu() for x in self._clean_batches()])
        if logits.ndim != 2:
            raise ConfigError(
                f"expected logits of shape (N, classes), got {tuple(logits.shape)}: use a network for classification"
            )
        predicted = logits.argmax(1)
        labels = _select_labels(clean, logits.shape[1], use_labels)
        self.has_labels = labels is not None
        self.labels = predicted if labels is None else torch.from_numpy(labels)
        self.clean_error = float((predicted != self.labels).double().mean()) if self.has_labels else None
        # Rounded as in the line of Python, so that the trials use exactly the value that a user pastes.
        self.threshold = round(calibrate_threshold(net, self._clean_batches()), 3)
        self._corrupted: dict[tuple[str, int], NDArray[np.uint8]] = {}  # filled by the first trial
        self.trials: list[Trial] = []

    @property
    def num_trials(self) -> int:
        """Number of trials of a complete search."""
        return NUM_BASELINES + len(LEARNING_RATES) * len(RESTORES)

    @property
    def num_steps(self) -> int:
        """Number of steps of one trial."""
        return self.num_rounds * len(HOLD_OUT) * math.ceil(self.num_images / self.batch_size)

    def run(self, *, seconds: float | None = None, on_step: Callable[[int, int], None] | None = None) -> None:
        """Run the baselines, and the candidates for as long as there is time.

        Args:
            seconds: Time limit; the trial that is running then is dropped.
            on_step: Called after each step with the number of finished steps and the total.
        """
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        total = self.num_trials * self.num_steps
        for number, (make_trial, model) in enumerate(self._models()):
            wrong = []
            for step, (x, y) in enumerate(self._stream()):
                if number >= NUM_BASELINES and time.monotonic() > deadline:
                    return
                logits = model(x).cpu()
                wrong.append((logits.argmax(1) != y) | ~logits.isfinite().all(1))
                if on_step:
                    on_step(number * self.num_steps + step + 1, total)
            self.trials.append(make_trial(torch.cat(wrong).view(-1, self.num_images)))

    @property
    def baselines(self) -> list[Trial]:
        """Trials of Source and BN Stats."""
        return self.trials[:NUM_BASELINES]

    @property
    def has_baselines(self) -> bool:
        """Whether both baselines are finished, so that there is a recommendation."""
        return len(self.baselines) == NUM_BASELINES

    @property
    def candidates(self) -> list[Trial]:
        """Trials of CoTTA."""
        return self.trials[NUM_BASELINES:]

    @property
    def default_candidate(self) -> Trial | None:
        """Trial of CoTTA with its default learning rate and restore probability; None if not finished."""
        return self.candidates[0] if self.candidates else None

    @property
    def best_candidate(self) -> Trial | None:
        """CoTTA with its defaults, or with settings that are significantly better; None if no trial is finished."""
        if not self.candidates:
            return None
        default, *others = self.candidates
        lowest = min(others, key=lambda trial: trial.error, default=default)
        return lowest if lowest.is_significantly_better_than(default) else default

    @property
    def recommended(self) -> Trial:
        """The simplest of Source, BN Stats and the best CoTTA that none of the others is significantly better than."""
        recommended, *others = [*self.baselines, *([self.best_candidate] if self.best_candidate else [])]
        for other in others:
            recommended = other if other.is_significantly_better_than(recommended) else recommended
        return recommended

    def format_python(self, trial: Trial) -> str:
        """Format the model of a trial as a line of Python.

        Args:
            trial: One of :attr:`trials`.

        Returns:
            A line that builds the model from ``net``.
        """
        if trial.learning_rate is None:
            return "model = ctta.Source(net)" if trial.method == "Source" else "model = ctta.BNStats(net)"
        return (
            f"model = ctta.CoTTA(net, threshold={self.threshold}, "
            f"optimizer=partial(torch.optim.Adam, lr={trial.learning_rate:g}), restore={trial.restore}, "
            f"views=ctta.views.image_views({self.num_views}))"
        )

    def _models(self) -> Iterator[tuple[Callable[[Tensor], Trial], AdaptiveModel]]:
        """Yield the model of each trial, and a function that makes the trial from the wrong predictions."""
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
                yield self._to_tensor(self._corrupted[name, number]), labels

    def _clean_batches(self) -> Iterator[Tensor]:
        for start in range(0, self.num_images, self.batch_size):
            yield self._to_tensor(self.images[start : start + self.batch_size])

    def _to_tensor(self, pixels: NDArray[np.uint8]) -> Tensor:
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).div(255).to(self.reference)


def _select_labels(clean: CleanImages, num_classes: int, use_labels: bool | None) -> NDArray[np.int64] | None:
    """Return the labels to score against, or None to use the network's predictions."""
    labels, num_folders = clean.labels, clean.num_folders
    if use_labels is False:
        return None
    if labels is None:
        if use_labels:
            raise DataError("the images have no labels; expected one subfolder per class, or an .npz with 'labels'")
        return None
    if num_folders is not None and num_folders != num_classes:
        if use_labels:
            raise DataError(f"expected one subfolder per class, got {num_folders} for {num_classes} classes")
        return None
    if not 0 <= labels.min() <= labels.max() < num_classes:
        raise DataError(
            f"got labels from {labels.min()} to {labels.max()} for a network with {num_classes} classes: check that "
            "the network belongs to these images"
        )
    return labels
