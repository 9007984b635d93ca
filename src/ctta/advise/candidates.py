"""Which methods are worth trying on a network, and why the others are not."""

import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ctta.advise.images import StreamOrder
from ctta.core.model import AdaptiveModel
from ctta.core.options import Precision
from ctta.core.registry import resolve_method
from ctta.errors import ConfigError, InputError, first_line
from ctta.methods import METHODS
from ctta.nn import find_norm_layers, has_batch_norm
from ctta.nn.vit import is_vit

#: The presets that are tried beside the methods at their published settings.
PRESETS = ("cotta_fast",)
#: Methods that only change the statistics of BatchNorm.
BATCH_NORM_ONLY = ("bn_stats", "bn_alpha", "bn_ema")
#: Methods with a memory of classes, or a prior on them, which pay off on sorted streams only.
FOR_SORTED = ("lame", "note", "rotta", "petta", "tribe", "sotta", "delta")
#: Methods whose updates on batches of few classes unlearn the others.
FOR_SHUFFLED = ("pseudo_label", "shot_im", "slr", "rpl", "tea", "adacontrast")


@dataclass(frozen=True)
class Candidate:
    """A method with settings."""

    method: str
    settings: dict[str, Any] = field(default_factory=dict)  # as plain values for ctta.toml
    amp: Precision | None = field(default=None, compare=False)  # the user's choice, alike for all candidates

    @property
    def key(self) -> str:
        """The name of the candidate, unique among those of a race, such as ``tent lr=0.003``."""
        return " ".join([self.method, *self.texts])

    @property
    def label(self) -> str:
        """The row of a table."""
        return " ".join([resolve_method(self.method).label, *self.texts])

    @property
    def texts(self) -> list[str]:
        """The settings as ``--set`` takes them."""
        return [f"{name}={value}" for name, value in self.settings.items()]

    def build(self, net: nn.Module) -> AdaptiveModel:
        """Wrap a network in a new model."""
        named = resolve_method(self.method)
        precision = {} if self.amp is None else {"amp": self.amp}
        return named.build(net, **precision, **named.parse(self.texts))


@dataclass(frozen=True)
class Probe:
    """What a few steps of a candidate cost."""

    ms_per_image: float
    memory: int  # bytes of weights, optimizer and buffers, and of what the backward pass of a step keeps


def count_norm_layers(net: nn.Module) -> dict[str, int]:
    """Return how many normalization layers of each class a network has."""
    return dict(Counter(type(net.get_submodule(name)).__name__ for name in sorted(find_norm_layers(net))))


def list_candidates(
    net: nn.Module, *, batch_size: int, order: StreamOrder, methods: Sequence[str] | None
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the candidates for a network without Source, and the methods that are left out with the reason.

    Without ``methods``, all are tried that can work.
    """
    names = dict.fromkeys(methods or [*METHODS, *PRESETS])
    names.pop("source", None)
    reasons = {
        name: _find_reason(name, net, batch_size=batch_size, order=order, is_chosen=methods is not None)
        for name in names
    }
    chosen = [Candidate(name) for name in names if reasons[name] is None]
    return chosen, {name: reason for name, reason in reasons.items() if reason}


def _find_reason(name: str, net: nn.Module, *, batch_size: int, order: StreamOrder, is_chosen: bool) -> str | None:
    """Return why a method cannot work, or is not worth trying unless the user has chosen it."""
    named = resolve_method(name)
    if named.info.needs_vit and not is_vit(net):
        return "for vision transformers only"
    if named.info.needs_source_data:
        return "needs statistics of source images, see ctta source-stats"
    if not has_batch_norm(net) and name in BATCH_NORM_ONLY:
        return "changes BatchNorm only, and there is none"
    if named.info.trains.startswith("norm layers") and not find_norm_layers(net):
        return "trains norm layers, and there are none"
    if is_chosen:
        return None
    if order == "shuffled" and name in FOR_SORTED:
        return "made for streams sorted by class"
    if order != "shuffled" and name in FOR_SHUFFLED:
        return "unlearns classes on streams sorted by class"
    if named.info.is_episodic and batch_size > 1 and named.info.backward_passes:
        return "one image at a time, too slow for a stream"
    return None


def vary(candidate: Candidate, net: nn.Module, threshold: float) -> list[Candidate]:
    """Return variants of a candidate: a third and three times its learning rate, and blended statistics.

    For the methods that have CoTTA's confidence threshold, also the one that was calibrated for the network.
    """
    named = resolve_method(candidate.method)
    model = candidate.build(net)
    variants = []
    if candidate.method.startswith(("cotta", "petal")) and "threshold" in signature(named.method).parameters:
        variants.append(replace(candidate, settings=candidate.settings | {"threshold": threshold}))
    if model.optimizer is not None:
        rate = float(model.optimizer.param_groups[0]["lr"])
        rates = [float(f"{factor * rate:.1g}") for factor in (0.3, 3)]
        variants += [replace(candidate, settings=candidate.settings | {"lr": each}) for each in rates]
    if "batch_stats" in signature(named.method).parameters and has_batch_norm(net) and model.batch_stats == "auto":
        variants.append(replace(candidate, settings=candidate.settings | {"batch_stats": "blend"}))
    return variants


def probe(candidate: Candidate, net: nn.Module, batches: Sequence[Tensor]) -> Probe | str:
    """Let a candidate adapt to two batches or more; return what a step costs, or why it cannot."""
    first, *others = batches
    try:
        model = candidate.build(net)
        with _count_saved_bytes() as saved:
            model(first).cpu()  # which waits until an accelerator is done
        started = time.perf_counter()
        for x in others:
            model(x).cpu()
        seconds = time.perf_counter() - started
    except (ConfigError, InputError) as error:
        return first_line(error)
    except RuntimeError as error:  # of the network within this method, such as an operation without a gradient
        return f"fails on this network: {first_line(error)}"
    num_images = sum(len(x) for x in others)
    return Probe(1000 * seconds / num_images, count_state_bytes(model) + max(saved, default=0))


def count_state_bytes(model: AdaptiveModel) -> int:
    """Return the bytes of everything that a model keeps between steps: weights, buffers, optimizer."""
    optimizers = [each.optimizer for each in model.modules() if isinstance(each, AdaptiveModel) and each.optimizer]
    states = (value for optimizer in optimizers for state in optimizer.state.values() for value in state.values())
    tensors = (*model.parameters(), *model.buffers(), *(value for value in states if isinstance(value, Tensor)))
    return sum(_unique_storages(tensors).values())


def _unique_storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


class _Saved:
    """A tensor that autograd keeps for the backward pass."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def _count_saved_bytes() -> Iterator[list[int]]:
    """Record the bytes that autograd holds for backward passes, each time that another tensor is kept."""
    live, totals, current = Counter[int](), [0], 0

    def release(pointer: int, size: int) -> None:
        nonlocal current
        live[pointer] -= 1
        if not live[pointer]:
            current -= size

    def keep(tensor: Tensor) -> _Saved:
        nonlocal current
        saved = _Saved(tensor)
        if tensor.is_leaf and tensor.requires_grad:  # a weight, which the model keeps anyway
            return saved
        storage = tensor.untyped_storage()
        pointer, size = storage.data_ptr(), storage.nbytes()
        if not live[pointer]:
            current += size
        live[pointer] += 1
        totals[0] = max(totals[0], current)
        weakref.finalize(saved, release, pointer, size)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved.tensor):
        yield totals
