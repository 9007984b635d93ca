"""The source exactly as it was trained: its own running statistics, whatever the method inside uses."""

import copy
from weakref import WeakKeyDictionary

from torch import nn

from ctta.norms import use_running_statistics_

_OF_SOURCES: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


def untouched(source: nn.Module) -> nn.Module:
    """A second tree of modules over the very tensors of the source, whose BatchNorms read their running statistics.

    A tree of its own, and no switch on the source's layers, because forks in other threads use these at the same time.
    Made once for each source, which forks share.
    """
    if source not in _OF_SOURCES:
        tensors = {id(tensor): tensor for tensor in (*source.parameters(), *source.buffers())}
        net = copy.deepcopy(source, tensors)
        use_running_statistics_(net)
        _OF_SOURCES[source] = net
    return _OF_SOURCES[source]
