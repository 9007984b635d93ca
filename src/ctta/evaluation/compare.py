"""Evaluate several methods on the same data."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from ctta.core.model import AdaptiveModel
from ctta.core.registry import adapt
from ctta.data.streams import Stream
from ctta.errors import ConfigError, InputError
from ctta.evaluation.comparison import Comparison
from ctta.evaluation.evaluate import evaluate, evaluate_together
from ctta.evaluation.inputs import PlainBatches, as_batches, as_model

#: What a method may be given as: a model, a plain network, the name of a method, or its class.
Method = AdaptiveModel | nn.Module | str | type[AdaptiveModel]


def compare(
    models: Mapping[str, Method] | Iterable[Method],
    stream: Stream | Iterable[Any] | Dataset[Any],
    *,
    net: nn.Module | None = None,
    batch_size: int | None = None,
    reset_at_domain: bool = False,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> Comparison:
    """Evaluate several methods on the same data.

    A stream is evaluated by one method after the other. Data that can be read only once, or that a loader shuffles, is
    read once, and every batch goes through all methods.

    Args:
        models: Methods by the names that the table shows, or a list of them. A method is a new model
            (``ctta.Tent(net)``), a plain network (evaluated as :class:`ctta.Source`), the name of a method
            (``"tent"``), or its class.
        stream: The data, with labels, as for :func:`ctta.evaluate`.
        net: The network for methods that are given by name or class; by default the only plain network of ``models``.
        batch_size: As for :func:`ctta.evaluate`.
        reset_at_domain: As for :func:`ctta.evaluate`.
        folder: Where to write the evaluations, one folder each; ``ctta report FOLDER`` makes a page of them. The
            evaluations of a stream are resumed from it.
        progress: Whether to show the progress on standard error.

    Returns:
        A table with 95 % intervals, see :mod:`ctta.evaluation.intervals` for how they are computed.

    Raises:
        ConfigError: A name or a model is given twice, or a method has no network.
        InputError: The data has no labels.

    >>> import torch, ctta
    >>> net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    >>> batches = [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(5)]
    >>> comparison = ctta.compare({"source": net, "tent": "tent"}, batches)
    >>> list(comparison.results), comparison.best in comparison.results
    (['source', 'tent'], True)
    """
    makers = _get_makers(models, net)
    folders = {} if folder is None else _name_folders(Path(folder), list(makers))
    built = {name: make() for name, make in makers.items()}
    batches = as_batches(stream, next(iter(built.values())), batch_size)
    if isinstance(batches, PlainBatches):
        results = evaluate_together(
            built,
            batches,
            reset_at_domain=reset_at_domain,
            folders=folders,
            labels=None,
            progress=progress,
        )
        return Comparison(results)
    results = {}
    for name in list(built):
        results[name] = evaluate(
            built.pop(name),
            batches,
            reset_at_domain=reset_at_domain,
            folder=folders.get(name),
            name=name,
            progress=progress,
        )
    return Comparison(results)


def _get_makers(
    models: Mapping[str, Method] | Iterable[Method], net: nn.Module | None
) -> dict[str, Callable[[], AdaptiveModel]]:
    """Return what builds each model, by its name."""
    if isinstance(models, nn.Module | str | type):
        raise TypeError("expected several methods, got one: give a dictionary such as {'source': net, 'tent': 'tent'}")
    named = models if isinstance(models, Mapping) else _name_methods(models)
    if not named:
        raise InputError("expected at least one method to compare, got none")
    plain = [model for model in named.values() if isinstance(model, nn.Module) and not isinstance(model, AdaptiveModel)]
    if net is None and len(plain) == 1:
        (net,) = plain
    given = [id(model) for model in named.values() if isinstance(model, AdaptiveModel)]
    if len(set(given)) < len(given):
        raise ConfigError("the same model is given twice, and each needs its own: pass model.fork()")
    return {str(name): _make_method(str(name), model, net) for name, model in named.items()}


def _name_methods(models: Iterable[Method]) -> dict[str, Method]:
    """Return a list of methods under their own names."""
    named: dict[str, Method] = {}
    for model in models:
        if isinstance(model, str):
            name = model
        elif isinstance(model, nn.Module) and not isinstance(model, AdaptiveModel):
            name = "source"
        else:
            name = model.__name__ if isinstance(model, type) else type(model).__name__
        if name in named:
            raise ConfigError(f"two methods are called {name!r}: give a dictionary with a name for each")
        named[name] = model
    return named


def _make_method(name: str, model: Method, net: nn.Module | None) -> Callable[[], AdaptiveModel]:
    if not isinstance(model, str | type):
        return lambda: as_model(model)
    if net is None:
        raise ConfigError(f"{name!r} needs a network to adapt: pass net=")
    return lambda: adapt(net, model) if isinstance(model, str) else model(net)


def _name_folders(root: Path, names: list[str]) -> dict[str, Path]:
    """Return a folder for each name, without characters that file systems refuse."""
    folders = {name: root / (re.sub(r"[^\w.+-]+", "_", name).strip("._") or "method") for name in names}
    if len({str(path).lower() for path in folders.values()}) < len(names):
        raise ConfigError(f"names must differ in letters and digits to name folders, got {', '.join(names)}")
    return folders
