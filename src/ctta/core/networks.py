"""The networks of a method: the frozen source, and what a constructor builds from it."""

import copy
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain

import torch
from torch import Tensor, nn
from typing_extensions import override

from ctta.core.options import Precision
from ctta.core.state import LazyModule
from ctta.core.validation import check_batch_stats, check_choice, check_integer, check_output
from ctta.errors import ConfigError
from ctta.nn import BatchStats, batch_fraction, find_norm_parameters
from ctta.nn.heads import count_classes, find_head, record_features_
from ctta.nn.surgery import Output, copy_for_adaptation, find_hooks, find_top_layers, names_outside, train_only_
from ctta.source_stats import SourceStats

#: What the names of :attr:`MethodNetworks.amp` stand for.
AMP_DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MethodNetworks(LazyModule):
    """The frozen copy of the caller's network, ``source``, and the tools that make a method's networks from it.

    Args:
        net: Any network; it is copied and never changed.
        batch_stats: The fraction of the batch in BatchNorm's statistics, see :class:`ctta.AdaptiveModel`.
        output: Where the logits are in the network's output.
        amp: The precision of its passes.
    """

    #: Layers nearest to the output that the method does not train although it trains others of their kind.
    skipped_layers: tuple[str, ...] = ()
    _callers_hooks: frozenset[int] = frozenset()
    _amp: Precision | None = None
    _average_is_uniform: bool

    def __init__(
        self,
        net: nn.Module,
        *,
        batch_stats: BatchStats = "auto",
        output: Output = None,
        amp: Precision | None = None,
    ) -> None:
        check_batch_stats(batch_stats)
        check_output(output)
        self._amp = amp or self._amp
        if self._amp is not None:
            check_choice("amp", self._amp, tuple(AMP_DTYPES))
        super().__init__()
        self._batch_stats, self._output = batch_stats, output
        self.source, self._trainable = self._take_source(net)

    def _take_source(self, net: nn.Module) -> tuple[nn.Module, set[str]]:
        """Return a frozen copy of a network, and the names of the parameters that require grad in the original.

        A wrapper returns those of the model that it wraps instead.
        """
        if not isinstance(net, nn.Module) or isinstance(net, MethodNetworks):
            raise TypeError(f"expected a network (torch.nn.Module) that does not adapt yet, got {type(net).__name__}")
        source = copy_for_adaptation(net, batch_stats=self._batch_stats, output=self._output)
        self._callers_hooks = find_hooks(source)
        trainable = {name for name, parameter in source.named_parameters() if parameter.requires_grad}
        return source.requires_grad_(False), trainable

    @property
    def batch_stats(self) -> BatchStats:
        """The fraction of the batch in BatchNorm's statistics; read-only, because the copies are built with it."""
        return self._batch_stats

    @property
    def output(self) -> Output:
        """Where the logits are in the network's output; read-only, because the copies are built with it."""
        return self._output

    @property
    def amp(self) -> Precision | None:
        """In which 16-bit type the networks compute; None for that of their weights. It is fixed for a stream."""
        return self._amp

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of ``amp`` for a pass of a network, in which a call of the model runs.

        What stays in float32: the weights and their gradients, the optimizer, the running statistics of norm layers,
        losses, confidences and averages over views, and every other state of a method.
        """
        if self.amp is None:
            return nullcontext()
        weight = next(chain(self.source.parameters(), self.source.buffers()), None)
        return torch.autocast("cpu" if weight is None else weight.device.type, AMP_DTYPES[self.amp])

    def batch_fraction(self, num_images: int) -> float:
        """Return the fraction of the batch in BatchNorm's statistics for a batch of this size.

        Args:
            num_images: The number of images, over all processes that share the batch.

        Returns:
            ``batch_stats``, or what ``"auto"`` or ``"blend"`` means for this batch; 0 for a network without BatchNorm.
        """
        return batch_fraction(self.source, check_integer("num_images", num_images, 1))

    # ---- for constructors: copies of the source ----

    @torch.inference_mode(False)
    def copy_of_source(self) -> nn.Module:
        """Return a copy of the source to adapt, trainable where the caller's network is."""
        net = copy.deepcopy(self.source)
        train_only_(net, self._trainable)
        return net

    def train_norms_(self, net: nn.Module, *, skip_top: bool = False) -> None:
        """Let only the scales and shifts of the normalization layers of a copy train.

        Args:
            net: The copy, such as the student.
            skip_top: Whether to leave out the layers nearest to the output, :func:`find_top_layers`. They
                are shown by ``repr`` as ``skipped_layers``.
        """
        self.skipped_layers = find_top_layers(net) if skip_top else ()
        train_only_(net, names_outside(find_norm_parameters(net), self.skipped_layers))

    # ---- for constructors: what is known about the network ----

    def use_head(self, head: str | None = None) -> str:
        """Find the classifier, and let the source and later copies of it record features.

        Call it before :meth:`copy_of_source`; then :func:`ctta.nn.heads.features_and_logits` works on every copy.

        Args:
            head: The hyperparameter ``head``: the name of the classifier, None to look for it.

        Returns:
            The name that was found.

        Raises:
            ConfigError: It was not found, or several layers fit.
        """
        name = find_head(self.source, head)
        record_features_(self.source, name)
        return name

    def count_classes(self, num_classes: int | None = None) -> int:
        """Return the number of classes, for buffers that need it before the first batch.

        Args:
            num_classes: The hyperparameter ``num_classes``: None to take it from the classifier.

        Returns:
            The number.

        Raises:
            ConfigError: The classifier was not found.
        """
        if num_classes is not None:
            return check_integer("num_classes", num_classes, 2)
        try:
            return count_classes(self.source)
        except ConfigError as error:
            raise ConfigError(f"{type(self).__name__} needs the number of classes: give num_classes=...") from error

    def register_average(self, num_classes: int | None = None, *, is_uniform: bool = True) -> int | None:
        """Declare ``self.average``, a buffer with a value per class, such as a moving average of predictions.

        Where the classifier is not found, the first update decides on its size: steps read it by
        :meth:`current_average`, and call :meth:`size_average_` before they change it.

        Args:
            num_classes: The hyperparameter ``num_classes``: None to take it from the classifier.
            is_uniform: Whether it starts at 1/C, instead of zero.

        Returns:
            The number of classes, None if it is not known yet.
        """
        self._average_is_uniform = is_uniform
        with suppress(ConfigError) if num_classes is None else nullcontext():
            num_classes = self.count_classes(num_classes)
        self.register_lazy_buffer("average", num_classes)
        if num_classes is not None:
            self.allocate_("average", self._start_average(num_classes))
        return num_classes

    def current_average(self, logits: Tensor) -> Tensor:
        """Return ``self.average``, or its first value if it has no size yet.

        Args:
            logits: What the network returned (N, C, ...).

        Returns:
            A tensor (C).
        """
        average = self.get_buffer("average")
        return average if average.numel() > 0 else self._start_average(logits.shape[1]).to(logits.device)

    def size_average_(self, logits: Tensor) -> None:
        """Give ``self.average`` its size and its first value, if the classifier was not found.

        Args:
            logits: What the network returned (N, C, ...).
        """
        if self.get_buffer("average").numel() == 0:
            self.allocate_("average", self.current_average(logits))

    def _start_average(self, num_classes: int) -> Tensor:
        if not self._average_is_uniform:
            return torch.zeros(num_classes)
        return torch.full((num_classes,), 1 / num_classes, dtype=next(self.source.parameters()).dtype)

    def use_source_stats(self, stats: SourceStats | None, *names: str) -> SourceStats:
        """Keep a copy of statistics of source images as ``self.source_stats``: part of the model and its checkpoints.

        A method takes them as its hyperparameter ``source_stats``. Loading a checkpoint does not need them again.

        Args:
            stats: The hyperparameter; computed by :func:`ctta.source_stats`.
            *names: What the method needs, such as ``"fisher"``.

        Returns:
            The copy.

        Raises:
            ConfigError: They were not given, or are of another network.
        """
        title = type(self).__name__
        if stats is None:
            raise ConfigError(
                f"{title} needs statistics of source images: ctta.{title}(net, source_stats=ctta.source_stats(net, "
                "batches)), or --set source_stats=FILE with a file of 'ctta source-stats' on the command line"
            )
        if not isinstance(stats, SourceStats):
            raise TypeError(f"source_stats must come from ctta.source_stats, got {type(stats).__name__}")
        stats.verify(self.source)
        self.source_stats = stats.select(names, title)
        self.source_stats.is_verified = True  # the copy; a fork may have another dtype, and so another fingerprint
        return self.source_stats

    @override
    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register a buffer that a step may change in place, also if the model is built under inference mode."""
        if tensor is not None and tensor.is_inference():
            with torch.inference_mode(False):
                tensor = tensor.clone()
        super().register_buffer(name, tensor, persistent)

    # ---- for steps ----

    def require_image_logits(self, logits: Tensor) -> None:
        """Raise if a network labels pixels, for a method that is defined for images only (``info.labels_pixels``).

        Args:
            logits: What the network returned.

        Raises:
            ConfigError: The logits are not (N, C).
        """
        if logits.ndim != 2:
            raise ConfigError(
                f"{type(self).__name__} labels whole images, and the network returned logits of shape "
                f"{tuple(logits.shape)}: expected (N, classes); choose another method for networks that label pixels"
            )
