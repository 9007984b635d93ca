"""Contrast of images with their views, with prototypes of the source's classes (RMT, SANTA) and with past images."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ctta.core.hyperparameters import CommonArguments
from ctta.core.parallel import current_reducer
from ctta.core.state import LazyModule
from ctta.core.validation import check_integer, check_non_negative, check_positive
from ctta.errors import ConfigError
from ctta.functional import at_least_float32, contrastive_loss
from ctta.methods.parts.prediction import StudentModel
from ctta.nn.heads import features_and_logits, head_weight
from ctta.source_stats import SourceStats
from ctta.views import View, Views, check_views, draw_views, image_views


class Projector(nn.Module):
    """Two linear layers with a ReLU between, through which features are compared.

    The weights are drawn as torch draws those of linear layers, but from ``seed``, that of the model: equal seeds give
    equal projectors, whatever else is drawn.

    >>> Projector(8, 4, seed=0)(torch.randn(5, 8)).shape
    torch.Size([5, 4])
    """

    @torch.inference_mode(False)
    def __init__(self, num_features: int, num_outputs: int, seed: int) -> None:
        super().__init__()
        digest = hashlib.blake2b(f"{seed}/projector".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest))
        self.hidden = _draw_linear(num_features, num_outputs, generator)
        self.outputs = _draw_linear(num_outputs, num_outputs, generator)

    @override
    def forward(self, features: Tensor) -> Tensor:
        projected: Tensor = self.outputs(F.relu(self.hidden(features)))
        return projected


@torch.no_grad()
def _draw_linear(num_inputs: int, num_outputs: int, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer with weights and biases uniform within 1 / sqrt(inputs), torch's default."""
    # Without torch's own initialization, which would draw from the global generator.
    layer = nn.utils.skip_init(nn.Linear, num_inputs, num_outputs, dtype=torch.float32)
    for parameter in layer.parameters():
        bound = num_inputs**-0.5
        parameter.uniform_(-bound, bound, generator=generator)
    assert isinstance(layer, nn.Linear)
    return layer


@torch.no_grad()
def nearest_prototypes(features: Tensor, stats: SourceStats) -> Tensor:
    """Return the mean of the source's class that is nearest to each feature (N, d), by cosine; without gradient.

    Classes without images have no mean.
    """
    means = stats["class_means"]
    cosines = F.normalize(at_least_float32(features), dim=1) @ F.normalize(at_least_float32(means), dim=1).T
    nearest = cosines.masked_fill(stats["class_counts"] == 0, -torch.inf).argmax(1)
    return means[nearest].to(features.dtype)


class ContrastArguments(CommonArguments, total=False):
    """The keyword arguments of a :class:`ContrastModel` beside ``source_stats``."""

    contrast_weight: float
    temperature: float
    projection: int
    views: Views
    head: str | None


class ContrastModel(StudentModel):
    """A method that compares each image with its views and with the nearest class of the source.

    A subclass trains ``projector``, through which features are compared, with its student.
    """

    checks_values_late = True

    def __init__(
        self,
        net: nn.Module,
        *,
        source_stats: SourceStats | None = None,
        contrast_weight: float = 1.0,
        temperature: float = 0.1,
        projection: int = 128,
        views: Views = image_views(1),
        head: str | None = None,
        **common: Unpack[CommonArguments],
    ) -> None:
        super().__init__(net, **common)
        check_non_negative("contrast_weight", contrast_weight)
        check_positive("temperature", temperature)
        check_views(views)
        self.contrast_weight, self.temperature, self.views = contrast_weight, temperature, views
        self.projection, self.head = check_integer("projection", projection, 1), self.use_head(head)
        self.use_source_stats(source_stats, "class_means", "class_counts")
        weights = head_weight(self.source)
        self.projector = Projector(weights.shape[1], projection, self.seed).to(weights)

    def compute_views(self, net: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the features (N, d) and the logits (N, C) of the batch, and then of each of its views.

        Without views the batch is its own.
        """
        features, logits = features_and_logits(net, x)
        self.require_image_logits(logits)
        drawn = draw_views(self.views, self.generator("views"))
        views = [features_and_logits(partial(view, net), x) for view in drawn] or [(features, logits)]
        return [features, *(each for each, _ in views)], [logits, *(each for _, each in views)]

    def contrast(self, features: Sequence[Tensor]) -> Tensor | float:
        """Return the weighted contrastive loss of which an image, its views and its nearest prototype are one sample.

        The features are those of the batch (N, d), and then of each view. With several processes the loss is that of
        the whole batch.
        """
        if self.contrast_weight == 0:
            return 0.0
        rows = torch.stack([nearest_prototypes(features[0], self.source_stats), *features], 1)
        return self.contrast_weight * contrastive_loss(self.projector(rows), self.temperature)


def average_with_views(losses: Sequence[Tensor]) -> Tensor:
    """Return the mean loss from those of a batch (N) and then of each view; half of it is from the batch itself."""
    return (losses[0] + torch.stack(list(losses[1:])).mean(0)).mean() / 2


def normalize_rows(features: Tensor) -> Tensor:
    """Return features (N, d) of length 1, in float32 or wider."""
    return F.normalize(at_least_float32(features), dim=1)


def draw_exactly(count: int, views: Views, generator: torch.Generator) -> Sequence[View]:
    """Return the views of one step, or raise a ConfigError unless there are as many as a method needs."""
    check_views(views)
    drawn = draw_views(views, generator)
    if len(drawn) != count:
        raise ConfigError(f"expected {count} view{'s' if count > 1 else ''} here, got {len(drawn)}: give other views")
    return drawn


class Ring(LazyModule):
    """A fixed number of rows, in columns of these first values, of which new ones replace the oldest."""

    cpu_buffers = ("_num_added",)
    _num_added: Tensor

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, values in columns.items():
            self.register_buffer(name, values)
        self.register_buffer("_num_added", torch.zeros((), dtype=torch.long))
        self.capacity = min(len(values) for values in columns.values())

    @property
    def num_added(self) -> int:
        """How many rows have been added, also those replaced since."""
        return int(self._num_added)

    def __getitem__(self, name: str) -> Tensor:
        """Return a column."""
        return self.get_buffer(name)

    def replace_oldest_(self, column: Tensor, rows: Tensor) -> Tensor:
        """Write rows to the places of the oldest ones of a column, or of a copy of it; return the column."""
        kept = rows.detach()[-self.capacity :]  # of more rows than there are places only the last stay
        first = self.num_added + len(rows) - len(kept)
        places = torch.arange(first, first + len(kept), device=column.device) % self.capacity
        return column.index_copy_(0, places, kept.to(column.dtype))

    @torch.no_grad()
    def add_(self, rows: Mapping[str, Tensor]) -> None:
        """Add as many rows to every column."""
        for name, values in rows.items():
            self.replace_oldest_(self[name], values)
        self._num_added += len(next(iter(rows.values())))

    @torch.no_grad()
    def average_neighbors(self, features: Tensor, name: str, num_neighbors: int) -> Tensor:
        """Return the mean of a column (N, C) over the rows whose ``features`` are nearest to (N, d) by cosine."""
        num_rows = min(self.num_added, self.capacity)
        cosines = normalize_rows(features) @ at_least_float32(self["features"][:num_rows]).T
        nearest = cosines.topk(min(num_neighbors, num_rows), dim=1).indices
        return self[name][nearest].mean(1)


class PastImages(nn.Module):
    """What AdaContrast keeps of past images: a bank whose predictions vote, and a queue for the contrast."""

    def __init__(self, weight: Tensor, bank_size: int, queue_size: int, generator: torch.Generator) -> None:
        super().__init__()
        check_integer("bank_size", bank_size, 1)
        check_integer("queue_size", queue_size, 1)
        num_classes, width = weight.shape
        features, votes = weight.new_zeros(bank_size, width), weight.new_zeros(bank_size, num_classes)
        drawn = normalize_rows(torch.randn(queue_size, width, generator=generator)).to(weight)
        labels = torch.randint(num_classes, (queue_size,), generator=generator).to(weight.device)
        self.bank = Ring({"features": features, "votes": votes})
        self.queue = Ring({"features": drawn, "labels": labels})

    def label(self, features: Tensor, logits: Tensor, num_neighbors: int, start_after: int) -> Tensor:
        """Return the class of each image (N): that of its nearest neighbors, once there are enough images."""
        if self.bank.num_added < max(start_after, 1):
            return logits.argmax(1)
        return self.bank.average_neighbors(features, "votes", num_neighbors).argmax(1)

    def contrast(self, query: Tensor, key: Tensor, labels: Tensor, temperature: float, *, labels_first: bool) -> Tensor:
        """Return the mean of -log of the share that its own key has in the similarity of a query to keys (InfoNCE).

        The keys are features of another view and get no gradient. Queued images of an image's own class do not count.
        With ``labels_first`` these labels replace the oldest ones of the queue before.
        """
        query, known = normalize_rows(query), self.queue["labels"]
        if labels_first:
            known = self.queue.replace_oldest_(known.clone(), current_reducer().gather(labels))
        positive = (query * normalize_rows(key).detach()).sum(1, keepdim=True)
        negative = (query @ self.queue["features"].to(query).T).masked_fill(labels.unsqueeze(1) == known, -torch.inf)
        return F.cross_entropy(torch.cat([positive, negative], 1) / temperature, torch.zeros_like(labels))

    def add_(self, key: Tensor, labels: Tensor, features: Tensor, logits: Tensor) -> None:
        """Add a batch: keys and their classes to the queue, features and predictions to the bank."""
        gather, votes = current_reducer().gather, at_least_float32(logits).softmax(1)
        self.queue.add_({"features": gather(normalize_rows(key)), "labels": gather(labels)})
        self.bank.add_({"features": gather(normalize_rows(features)), "votes": gather(votes)})
