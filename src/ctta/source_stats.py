"""What some methods need to know of source images: computed once, saved, and given to any method.

>>> import torch
>>> from torch import nn
>>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
>>> stats = source_stats(net, [torch.randn(16, 4) for _ in range(4)])
>>> stats
SourceStats(64 images, labels of the network: class_counts, class_means, ..., layer_outputs.variance)
>>> import ctta
>>> model = ctta.EATA(net, source_stats=stats)
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ctta.errors import CheckpointError, ConfigError, InputError
from ctta.functional import at_least_float32, hard_cross_entropy, widest_float
from ctta.io.atomic import atomic_write
from ctta.io.tensors import read_tensors, write_tensors
from ctta.nn import BatchStats, find_norm_layers, find_norm_parameters
from ctta.nn.heads import features_and_logits, find_head, has_quantized_layers, record_features_
from ctta.nn.surgery import Output, check_batch, copy_for_adaptation, explain_memory, fingerprint, train_only_
from ctta.nn.vit import find_blocks

__all__ = ["SourceStats", "source_stats"]

_METADATA_KEY, _FORMAT = "ctta-source-stats", 1
#: Statistics that need the features before the classifier.
_OF_FEATURES = ("class_counts", "class_means", "class_variances", "feature_mean", "feature_variance")


class SourceStats(nn.Module):
    """Statistics of source images, of one network. They are made by :func:`ctta.source_stats`.

    A method keeps a copy of those that it needs as a submodule, so its checkpoints hold them.

    Args:
        tensors: The statistics: ``NAME``, or ``NAME/LAYER`` for those that have one tensor per parameter or layer.
        fingerprint: That of the network.
        num_images: How many images they were computed from.
        is_labeled: Whether the classes are those of given labels, and not of the network's predictions.
        is_verified: Whether the network is known to be the right one.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        fingerprint: str,
        num_images: int,
        is_labeled: bool,
        is_verified: bool = False,
    ) -> None:
        super().__init__()
        self.fingerprint, self.num_images = fingerprint, num_images
        self.is_labeled, self.is_verified = is_labeled, is_verified
        for name, value in tensors.items():
            self.register_buffer(name.replace(".", ":"), value)  # torch allows no dots in the names of buffers

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All statistics by name."""
        return {name.replace(":", "."): value for name, value in self.named_buffers()}

    @property
    def names(self) -> list[str]:
        """The statistics there are, without parameters and layers."""
        return sorted({name.partition("/")[0] for name in self.tensors})

    def __getitem__(self, name: str) -> Tensor:
        """Return one statistic, such as ``stats["class_means"]`` (C, d)."""
        return self.tensors[name]

    def by_name(self, name: str) -> dict[str, Tensor]:
        """Return a statistic that has one tensor per parameter or layer.

        Args:
            name: Such as ``"fisher"`` or ``"layer_inputs.mean"``.

        Returns:
            The tensors by the name of the parameter or layer.
        """
        return {key.partition("/")[2]: value for key, value in self.tensors.items() if key.startswith(f"{name}/")}

    def select(self, names: Iterable[str], owner: str) -> Self:
        """Return a copy of some statistics.

        Args:
            names: What is needed.
            owner: Who needs it, for the error.

        Returns:
            Statistics of the same network.

        Raises:
            ConfigError: Some are missing.
        """
        names = set(names)
        if missing := sorted(names - set(self.names)):
            hint = " with head=..., since the head was not found" if {*missing} & {*_OF_FEATURES} else ""
            hint += " with blocks=True" if any(name.startswith("block_outputs") for name in missing) else ""
            raise ConfigError(f"{owner} needs {', '.join(missing)} of the source images: compute source_stats{hint}")
        chosen = {name: value.clone() for name, value in self.tensors.items() if name.partition("/")[0] in names}
        return type(self)(chosen, **self._facts())

    def verify(self, net: nn.Module) -> None:
        """Raise unless the statistics are of this network.

        Args:
            net: The source network.

        Raises:
            ConfigError: They are of another one.
        """
        if not self.is_verified and self.fingerprint != (found := fingerprint(net)):
            raise ConfigError(
                f"the source_stats are of a network with fingerprint {self.fingerprint}, and this one has {found}: "
                "compute them again with ctta.source_stats(net, batches)"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the statistics to a safetensors file with a checksum, completely or not at all.

        Args:
            path: The file, which is replaced if it exists.
        """
        header = {"format": _FORMAT, **self._facts(), "is_verified": False}
        with atomic_write(path) as temporary:
            write_tensors(temporary, self.tensors, _METADATA_KEY, header)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what :meth:`save` wrote.

        Args:
            path: The file.

        Returns:
            The statistics; a method that takes them checks that they are of its network.

        Raises:
            CheckpointError: The file is damaged, or not one of source statistics.
        """
        header, tensors = read_tensors(path, _METADATA_KEY)
        if not isinstance(header, dict) or header.pop("format", None) != _FORMAT:
            raise CheckpointError(f"{path} does not hold source statistics of this version: run ctta source-stats")
        try:
            return cls(tensors, **header)
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"the header of {path} is damaged: {error}") from error

    def to_settings(self) -> dict[str, Any]:
        """Return what a checkpoint says about the statistics beside their tensors, which are part of the stream."""
        layout = [
            [name, str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in self.tensors.items()
        ]
        return {"layout": layout, **self._facts()}

    @classmethod
    def from_settings(cls, *, layout: Iterable[tuple[str, str, tuple[int, ...]]], **facts: Any) -> Self:
        """Return statistics of zeros, into which a checkpoint's tensors are copied.

        Args:
            layout: Name, dtype and shape of each tensor.
            **facts: The other arguments of the class.

        Returns:
            Statistics that need no further check: a checkpoint is loaded with its own network.
        """
        tensors = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in layout}
        return cls(tensors, **{**facts, "is_verified": True})

    def _facts(self) -> dict[str, Any]:
        names = ("fingerprint", "num_images", "is_labeled", "is_verified")
        return {name: getattr(self, name) for name in names}

    @override
    def __repr__(self) -> str:
        names = self.names if len(self.names) < 4 else [*self.names[:2], "...", self.names[-1]]
        labels = "given labels" if self.is_labeled else "labels of the network"
        return f"SourceStats({self.num_images} images, {labels}: {', '.join(names)})"


@torch.inference_mode(False)
@torch.enable_grad()
def source_stats(
    net: nn.Module,
    batches: Iterable[Any],
    labels: Tensor | Iterable[Tensor] | Literal["batches"] | None = None,
    *,
    parameters: Literal["norms", "all"] = "norms",
    blocks: bool = False,
    head: str | None = None,
    batch_stats: BatchStats = 1.0,
    output: Output = None,
) -> SourceStats:
    """Compute what any method may need of source images.

    ==================  ===============================================================================================
    ``fisher``          per parameter: the mean over batches of the squared gradient of the batch's mean loss against
                        the network's own predictions. As in EATA's code it depends on the batch size; use that of the
                        stream. Quantized layers have no gradient, and a network with them no ``fisher``
    ``class_means``     features before the classifier, mean per class (C, d): the prototypes; with
                        ``class_variances`` (C, d) and ``class_counts`` (C)
    ``feature_mean``    of all features (d), with ``feature_variance``
    ``layer_inputs``    per norm layer and channel: ``layer_inputs.mean`` and ``layer_inputs.variance``; of tokens, the
                        first one (CLS) counts; ``layer_outputs`` alike
    ``block_outputs``   per block of a vision transformer: ``block_outputs.mean`` (d) and ``block_outputs.covariance``
                        (d, d) of all tokens; with ``blocks=True`` only
    ==================  ===============================================================================================

    Args:
        net: The source network.
        batches: Inputs, or tuples that start with them. EATA uses 2,000 images.
        labels: Classes of the images: one tensor for all, one per batch, or ``"batches"`` for the second entry of each
            batch. By default the network's own predictions.
        parameters: Whether ``fisher`` is of the scales and shifts of norm layers, or of all parameters.
        blocks: Whether to compute ``block_outputs``, which PEA needs: a d x d product per block and batch, in double
            precision on the host.
        head: Name of the classifier, if it is not found. Without one there are no statistics of features.
        batch_stats: The fraction of the batch in BatchNorm's statistics meanwhile; that of the method.
        output: Where the logits are in the network's output; by default the usual places.

    Returns:
        The statistics; ``save`` writes them to a file.

    Raises:
        ConfigError: ``blocks`` is set, and the network is no vision transformer with a class token.
        InputError: There are no batches, or no labels for one.
        torch.OutOfMemoryError: A batch does not fit into the memory of a device.
    """
    net_copy = copy_for_adaptation(net, batch_stats=batch_stats, output=output)
    trained = find_norm_parameters(net_copy)
    if has_quantized_layers(net_copy):
        train_only_(net_copy, set())
    else:
        train_only_(net_copy, trained if parameters == "norms" else {name for name, _ in net_copy.named_parameters()})
    has_head = _record_head_(net_copy, head)
    collector = _Collector(net_copy, find_blocks(net_copy) if blocks else ())
    for x, given in _pair_with_labels(batches, labels):
        check_batch(x)
        rows = x.to(next(net_copy.parameters(), x).device)
        collector.add(rows.clone() if rows.is_inference() else rows, given, has_head=has_head)
    if collector.num_images == 0:
        raise InputError("no batches to compute statistics from: give some source images")
    return SourceStats(
        collector.compute(),
        fingerprint=fingerprint(net),
        num_images=collector.num_images,
        is_labeled=labels is not None,
    )


def _record_head_(net: nn.Module, head: str | None) -> bool:
    """Let the head record features; return False if it was not named and not found."""
    try:
        record_features_(net, find_head(net, head))
    except ConfigError:
        if head is not None:
            raise
        return False
    return True


def _pair_with_labels(
    batches: Iterable[Any], labels: Tensor | Iterable[Tensor] | Literal["batches"] | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the inputs of each batch with their labels."""
    if isinstance(batches, Tensor):
        raise TypeError("expected an iterable of batches, got a single tensor: give [x]")
    rest = labels if isinstance(labels, Tensor) else None
    per_batch = iter(()) if labels is None or isinstance(labels, str | Tensor) else iter(labels)
    for batch in batches:
        x = batch if isinstance(batch, Tensor) else batch[0]
        found: Tensor | None = None
        if labels is not None and isinstance(labels, str):
            found = None if isinstance(batch, Tensor) or len(batch) < 2 else torch.as_tensor(batch[1])
        elif rest is not None:
            found, rest = rest[: len(x)], rest[len(x) :]
        elif labels is not None:
            found = next(per_batch, None)
        if labels is not None and (found is None or len(found) != len(x)):
            raise InputError(f"expected {len(x)} labels for a batch of {len(x)} images, got {found}")
        yield x, found


class _Moments:
    """Means and variances of groups of vectors, merged batch by batch without cancellation."""

    def __init__(self) -> None:
        self.count = self.mean = self.square = torch.zeros(())

    def add(self, vectors: Tensor, groups: Tensor, num_groups: int) -> None:
        """Add vectors (E, d), each of the group that ``groups`` (E) names."""
        vectors = vectors.detach()
        if widest_float(vectors.device) is not torch.float64:
            vectors, groups = vectors.cpu(), groups.cpu()
        vectors = vectors.double()
        count = torch.bincount(groups, minlength=num_groups).double().to(vectors.device).unsqueeze(1)
        mean = vectors.new_zeros(num_groups, vectors.shape[1]).index_add_(0, groups, vectors) / count.clamp_min(1)
        deviations = (vectors - mean[groups]).square()
        square = torch.zeros_like(mean).index_add_(0, groups, deviations)
        if self.count.ndim == 0:
            self.count, self.mean, self.square = count, mean, square
            return
        total = (self.count + count).clamp_min(1)
        difference = mean - self.mean
        self.square = self.square + square + difference.square() * self.count * count / total
        self.mean = self.mean + difference * count / total
        self.count = self.count + count

    @property
    def variance(self) -> Tensor:
        return self.square / self.count.clamp_min(1)


class _Covariance:
    """Mean and covariance of all tokens that a block returns, merged batch by batch without cancellation."""

    def __init__(self) -> None:
        self.count, self.mean, self.product = 0, torch.zeros(()), torch.zeros(())

    def record(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        tokens = (output[0] if isinstance(output, tuple) else output).detach().flatten(0, 1).cpu().double()
        mean = tokens.mean(0)
        difference, total = mean - self.mean, self.count + len(tokens)
        between = torch.outer(difference, difference) * self.count * len(tokens) / total
        self.product = self.product + (tokens - mean).T @ (tokens - mean) + between
        self.mean, self.count = self.mean + difference * len(tokens) / total, total

    @property
    def covariance(self) -> Tensor:
        return self.product / self.count


class _Collector:
    """Statistics while batches come in."""

    def __init__(self, net: nn.Module, blocks: Sequence[str]) -> None:
        self.net, self.num_images, self.num_batches = net, 0, 0
        self.parameters = {name: value for name, value in net.named_parameters() if value.requires_grad}
        self.squares = {name: torch.zeros_like(value) for name, value in self.parameters.items()}
        self.classes, self.features = _Moments(), _Moments()
        self.layers: dict[str, _Moments] = {}
        for name in find_norm_layers(net):
            net.get_submodule(name).register_forward_hook(self._make_hook(name))
        self.blocks = {name: _Covariance() for name in blocks}
        for name, covariance in self.blocks.items():
            net.get_submodule(name).register_forward_hook(covariance.record)

    def _make_hook(self, name: str) -> Any:
        def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            for kind, values in (("layer_inputs", inputs[0]), ("layer_outputs", output)):
                vectors = _channels_last(module, values)
                groups = torch.zeros(len(vectors), dtype=torch.long, device=vectors.device)
                self.layers.setdefault(f"{kind}/{name}", _Moments()).add(vectors, groups, 1)

        return record

    def add(self, x: Tensor, labels: Tensor | None, *, has_head: bool) -> None:
        """Add a batch; if it does not fit into the memory, the error says which does."""

        def add(rows: Tensor) -> None:
            self._add(rows, None if labels is None else labels[: len(rows)], has_head=has_head)

        try:
            add(x)
        except torch.OutOfMemoryError as error:
            error.__traceback__ = None  # or its frames would hold what the pass has allocated
            raise torch.OutOfMemoryError(explain_memory(x, add)) from error

    def _add(self, x: Tensor, labels: Tensor | None, *, has_head: bool) -> None:
        features, logits = features_and_logits(self.net, x) if has_head else (None, self.net(x))
        self.num_images, self.num_batches = self.num_images + len(x), self.num_batches + 1
        if self.parameters:
            loss = hard_cross_entropy(logits, logits.detach()).mean()
            gradients = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
            for name, gradient in zip(self.parameters, gradients, strict=True):
                if gradient is not None:
                    self.squares[name] += gradient.square()
        if features is not None:
            self._add_features(features, logits.detach(), labels)

    def _add_features(self, features: Tensor, logits: Tensor, labels: Tensor | None) -> None:
        groups = logits.argmax(1) if labels is None else labels.to(logits.device).long()
        if (
            groups.ndim > 1 and groups.shape[1:] != features.shape[2:]
        ):  # pixels: the features are smaller than the image
            groups = F.interpolate(groups.unsqueeze(1).float(), features.shape[2:]).squeeze(1).long()
        vectors = at_least_float32(features).movedim(1, -1).reshape(-1, features.shape[1])
        groups, num_classes = groups.reshape(-1), logits.shape[1]
        is_class = (groups >= 0) & (groups < num_classes)  # others are labels that do not count
        self.classes.add(vectors[is_class], groups[is_class], num_classes)
        self.features.add(vectors, torch.zeros_like(groups), 1)

    def compute(self) -> dict[str, Tensor]:
        """Return all statistics, in the precision of the network."""
        dtype = next((value.dtype for value in self.net.parameters()), torch.get_default_dtype())
        found = {f"fisher/{name}": square / self.num_batches for name, square in self.squares.items()}
        if self.classes.count.ndim:
            found |= {"class_counts": self.classes.count[:, 0], "class_means": self.classes.mean}
            found |= {"class_variances": self.classes.variance}
            found |= {"feature_mean": self.features.mean[0], "feature_variance": self.features.variance[0]}
        for key, moments in self.layers.items():
            kind, _, layer = key.partition("/")
            found[f"{kind}.mean/{layer}"] = moments.mean[0]
            found[f"{kind}.variance/{layer}"] = moments.variance[0]
        for name, block in self.blocks.items():
            found |= {f"block_outputs.mean/{name}": block.mean, f"block_outputs.covariance/{name}": block.covariance}
        return {name: value.detach().to("cpu", dtype) for name, value in found.items()}


def _channels_last(layer: nn.Module, values: Tensor) -> Tensor:
    """Return one vector per element (E, d): of tokens the first one, of images and vectors all."""
    is_last = isinstance(layer, nn.LayerNorm | nn.RMSNorm) or (values.ndim == 3 and not isinstance(layer, nn.GroupNorm))
    if is_last and values.ndim == 3:
        return values[:, 0]
    return values.reshape(-1, values.shape[-1]) if is_last else values.movedim(1, -1).reshape(-1, values.shape[1])
