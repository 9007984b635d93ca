"""The parts of a vision transformer, found by structure: its blocks, its class token, and how that attends to others.

Supported are networks with one class token in front, whose blocks lie in one list, such as those of timm, torchvision
and transformers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctta.errors import ConfigError
from ctta.functional import at_least_float32
from ctta.nn import find_norm_layers
from ctta.nn.heads import is_linear

#: Names of the projections to queries and keys, where they are two layers.
_PROJECTIONS = (("q_proj", "k_proj"), ("query", "key"), ("q", "k"), ("to_q", "to_k"))


def find_blocks(net: nn.Module) -> tuple[str, ...]:
    """Return the names of the blocks of a vision transformer with a class token.

    Args:
        net: The network.

    Returns:
        The names for ``net.get_submodule``, from the input to the output.

    Raises:
        ConfigError: It is another kind of network.
    """
    find_class_token(net)
    blocks = [_find_block(net, name) for name, module in net.named_modules() if _is_attention(module)]
    if not blocks or None in blocks:
        raise _refuse("no list of blocks with attention")
    names = [name for name in blocks if name is not None]
    if len({name.rpartition(".")[0] for name in names}) > 1 or len({*names}) < len(names):
        raise _refuse("several lists of blocks, or several attentions in a block")
    return tuple(names)


def find_class_token(net: nn.Module) -> str:
    """Return the name of the class token of a vision transformer, a parameter (1, 1, d).

    Args:
        net: The network.

    Returns:
        The name for ``net.get_parameter``.

    Raises:
        ConfigError: There is none, or there are further tokens.
    """
    tokens = {name: value for name, value in net.named_parameters() if name.endswith(("token", "tokens"))}
    found = [name for name, value in tokens.items() if _is_class_token(name, value)]
    others = [name for name in tokens if name not in found and "mask" not in name]
    if len(found) != 1 or others:
        extra = f"; it has also {', '.join(others)}" if others else ""
        raise _refuse(f"{len(found) or 'no'} class token{extra}")
    return found[0]


def find_block_norms(net: nn.Module) -> tuple[str, ...]:
    """Return the names of the norm layers that the tokens between two blocks pass next.

    Args:
        net: A vision transformer.

    Returns:
        The first norm layer of each block but the first.

    Raises:
        ConfigError: A block has no norm layer of its own.
    """
    layers, found = find_norm_layers(net), []
    for block in find_blocks(net)[1:]:
        own = [name for child, _ in net.get_submodule(block).named_children() if (name := f"{block}.{child}") in layers]
        if not own:
            raise _refuse(f"no norm layer in {block}")
        found.append(own[0])
    return tuple(found)


def is_vit(net: nn.Module) -> bool:
    """Return whether :func:`find_blocks` finds the blocks of a network.

    Args:
        net: The network.

    Returns:
        Whether it is a vision transformer with a class token.
    """
    try:
        find_blocks(net)
    except ConfigError:
        return False
    return True


def _refuse(found: str) -> ConfigError:
    return ConfigError(
        f"the network has {found}: expected a vision transformer with one class token and one list of blocks, such as "
        "timm's, torchvision's or transformers' ViT; choose another method for other networks"
    )


def _is_class_token(name: str, value: Tensor) -> bool:
    last = name.rpartition(".")[2]
    return last.startswith(("cls", "class")) and value.ndim == 3 and value.shape[:2] == (1, 1)


def _is_attention(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return module.in_proj_weight is not None
    return _count_heads(module) is not None and (_is_linear(module, "qkv") or _find_projections(module) is not None)


def _is_linear(module: nn.Module, name: str) -> bool:
    layer = getattr(module, name, None)
    return isinstance(layer, nn.Module) and is_linear(layer)


def _find_projections(module: nn.Module) -> tuple[str, str] | None:
    return next((pair for pair in _PROJECTIONS if all(_is_linear(module, name) for name in pair)), None)


def _count_heads(module: nn.Module) -> int | None:
    heads = getattr(module, "num_heads", getattr(module, "num_attention_heads", None))
    return heads if isinstance(heads, int) else None


def _find_block(net: nn.Module, attention: str) -> str | None:
    """Return the entry of the nearest list of modules around an attention."""
    parts = attention.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if isinstance(net.get_submodule(".".join(parts[: end - 1])), nn.Sequential | nn.ModuleList):
            return ".".join(parts[:end])
    return None


@contextmanager
def change_tokens(net: nn.Module, block: str, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change the tokens that a block gets within the context.

    Args:
        net: The network.
        block: The name of the block, of :func:`find_blocks`.
        change: A function from tokens (N, T, d) to tokens, of which there may be another number.
    """

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (change(inputs[0]), *inputs[1:])

    handle = net.get_submodule(block).register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def record_class_attention(net: nn.Module, block: str) -> Iterator[list[Tensor]]:
    """Record how the class token attends to the other tokens in a block within the context.

    Args:
        net: The network.
        block: The name of the block, of :func:`find_blocks`.

    Yields:
        A list that grows by one tensor (N, T - 1) per call of the network: the mean over heads, without gradient.
    """
    owner = net.get_submodule(block)
    attention = next(module for module in owner.modules() if _is_attention(module))
    found: list[Tensor] = []
    projected: dict[str, Tensor] = {}

    def record_input(module: nn.MultiheadAttention, inputs: tuple[Any, ...]) -> None:
        with torch.no_grad():
            tokens = inputs[0] if module.batch_first else inputs[0].transpose(0, 1)
            joint = F.linear(tokens, module.in_proj_weight, module.in_proj_bias)
            query, key, _ = joint.chunk(3, -1)
            found.append(_attend(module, query, key))

    def record_joint(module: nn.Module, inputs: tuple[Any, ...], joint: Tensor) -> None:
        query, key, _ = joint.detach().chunk(3, -1)
        found.append(_attend(attention, query, key))

    def record_query(module: nn.Module, inputs: tuple[Any, ...], query: Tensor) -> None:
        projected["query"] = query.detach()

    def record_key(module: nn.Module, inputs: tuple[Any, ...], key: Tensor) -> None:
        found.append(_attend(attention, projected["query"], key.detach()))

    if isinstance(attention, nn.MultiheadAttention):
        handles = [attention.register_forward_pre_hook(record_input)]
    elif _is_linear(attention, "qkv"):
        handles = [attention.get_submodule("qkv").register_forward_hook(record_joint)]
    else:
        names = _find_projections(attention)
        assert names is not None, "an attention without qkv has both"
        hooks = zip(names, (record_query, record_key), strict=True)
        handles = [attention.get_submodule(name).register_forward_hook(hook) for name, hook in hooks]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _attend(attention: nn.Module, query: Tensor, key: Tensor) -> Tensor:
    """Return the attention of the first token to the others (N, T - 1) from projections (N, T, d)."""
    num_heads = _count_heads(attention) or 1
    query, key = (values.unflatten(-1, (num_heads, -1)).transpose(1, 2) for values in (query, key))
    for name in ("q_norm", "k_norm"):  # of each head, in some of timm's networks
        if isinstance(norm := getattr(attention, name, None), nn.Module):
            query, key = (norm(query), key) if name == "q_norm" else (query, norm(key))
    query, key = at_least_float32(query), at_least_float32(key)
    weights: Tensor = (query[:, :, :1] @ key.transpose(2, 3) / query.shape[-1] ** 0.5).softmax(-1)
    return weights[:, :, 0, 1:].mean(1)
