"""What identifies a network's weights."""

import hashlib
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ctta.surgery import unwrap


def fingerprint(net: nn.Module) -> str:
    """A hash of every weight and buffer: equal for equal networks, on any device.

    >>> fingerprint(nn.Identity())
    'e3b0c44298fc1c149afbf4c8996fb924'
    """
    digest = hashlib.sha256()
    for name, value in unwrap(net).state_dict().items():
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            # As bytes, because numpy does not know every dtype.
            content: memoryview = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest.update(content)
    return digest.hexdigest()[:32]


_OF_SOURCES: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], str]] = WeakKeyDictionary()


def source_fingerprint(source: nn.Module) -> str:
    """The fingerprint of a source network, computed once: streams never change it, and forks share it.

    Should someone write to its tensors all the same (``load_state_dict``), their version numbers tell.
    """
    versions = tuple(value._version for value in source.state_dict().values() if isinstance(value, Tensor))
    if source not in _OF_SOURCES or _OF_SOURCES[source][0] != versions:
        _OF_SOURCES[source] = versions, fingerprint(source)
    return _OF_SOURCES[source][1]
