"""Hashes that identify the weights of a network."""

import hashlib
from collections.abc import MutableMapping

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ctta.nn.surgery import unwrap


def fingerprint(net: nn.Module) -> str:
    """Return a hash of every weight and buffer of a network.

    Args:
        net: Any network; compiled and data-parallel wrappers are removed.

    Returns:
        32 hexadecimal digits, equal for equal networks on any device.

    >>> fingerprint(nn.Identity())
    'e3b0c44298fc1c149afbf4c8996fb924'
    """
    digest = hashlib.sha256()
    for name, value in unwrap(net).state_dict().items():
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            # As bytes, because numpy does not support every dtype.
            content: memoryview = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest.update(content)
    return digest.hexdigest()[:32]


# By the first tensor of a network, since forks have modules of their own over the same tensors.
_cache: MutableMapping[Tensor, tuple[tuple[tuple[int, int], ...], str]] = WeakIdKeyDictionary()


def source_fingerprint(source: nn.Module) -> str:
    """Return the fingerprint of a source network, cached because streams never change it and forks share it.

    In-place writes by the user (``load_state_dict``) are noticed by the version numbers of the tensors.
    """
    tensors = [value for value in source.state_dict(keep_vars=True).values() if isinstance(value, Tensor)]
    if not tensors:
        return fingerprint(source)
    versions = tuple((id(value), value._version) for value in tensors)
    if tensors[0] not in _cache or _cache[tensors[0]][0] != versions:
        _cache[tensors[0]] = versions, fingerprint(source)
    return _cache[tensors[0]][1]
