"""An independent implementation of REM with plain loops over the images, tokens and heads of a vision transformer."""

import copy
import math
from collections.abc import Callable

import torch
from naive import MakeOptimizer, add_up, cross, probabilities
from naive_entropy import shannon
from torch import Tensor, nn

from ctta.testing.networks import BlockViT, ViTBlock


def naive_norm(layer: nn.LayerNorm, token: Tensor) -> Tensor:
    centered = token - token.mean()
    return centered / (centered.square().mean() + layer.eps).sqrt() * layer.weight + layer.bias


def naive_attention(block: ViTBlock, tokens: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the attended tokens, and the weights of the class token for all tokens, one vector per head."""
    heads, joint = block.attn.num_heads, [block.attn.qkv(naive_norm(block.norm1, token)) for token in tokens]
    width = len(tokens[0])
    size, per_head, of_class = width // heads, [], []
    for head in range(heads):
        start = head * size
        queries = [each[start : start + size] for each in joint]
        keys = [each[width + start : width + start + size] for each in joint]
        values = [each[2 * width + start : 2 * width + start + size] for each in joint]
        outputs = []
        for number, query in enumerate(queries):
            scores = torch.stack([(query * key).sum() / math.sqrt(size) for key in keys])
            weights = probabilities(scores)
            if number == 0:
                of_class.append(torch.stack(weights).detach())
            outputs.append(add_up(w * value for w, value in zip(weights, values, strict=True)))
        per_head.append(outputs)
    attended = [torch.cat([outputs[t] for outputs in per_head]) for t in range(len(tokens))]
    return [block.attn.proj(each) for each in attended], of_class


def naive_predict(net: BlockViT, image: Tensor, kept: list[int] | None = None) -> tuple[Tensor, list[float]]:
    """Return the logits of an image, of which some patches are kept, and the class token's attention to patches."""
    patches = net.patch_embed(image.unsqueeze(0)).flatten(2)[0].T
    tokens = [net.cls_token[0, 0] + net.pos_embed[0, 0]]
    tokens += [patches[i] + net.pos_embed[0, i + 1] for i in (range(len(patches)) if kept is None else kept)]
    of_class: list[Tensor] = []
    for block in net.blocks:
        assert isinstance(block, ViTBlock)
        attended, of_class = naive_attention(block, tokens)
        tokens = [token + change for token, change in zip(tokens, attended, strict=True)]
        tokens = [token + block.mlp(naive_norm(block.norm2, token)) for token in tokens]
    logits: Tensor = net.head(naive_norm(net.norm, tokens[0]))
    return logits, [float(sum(head[i + 1] for head in of_class)) / len(of_class) for i in range(len(tokens) - 1)]


def naive_rem(
    net: BlockViT,
    batches: list[Tensor],
    *,
    parameters: Callable[[BlockViT], list[nn.Parameter]],
    optimizer: MakeOptimizer,
    masked: tuple[float, ...],
    ranking: float,
    margin: float,
) -> tuple[list[Tensor], BlockViT]:
    """Run REM; ``margin`` is a fraction of ln C."""
    student = copy.deepcopy(net).eval()
    trained = parameters(student)
    descent, predictions = optimizer(trained), []
    for x in batches:
        losses, rows = [], []
        for image in x:
            whole, attention = naive_predict(student, image)
            order = sorted(range(len(attention)), key=lambda i: attention[i])
            views = [whole]
            for fraction in masked:
                views.append(naive_predict(student, image, order[: int((1 - fraction) * len(order))])[0])
            rows.append(whole.detach())
            for i in range(len(views)):
                for j in range(i + 1, len(views)):
                    target = [p.detach() for p in probabilities(views[i])]
                    losses.append(cross(target, probabilities(views[j])))
                    gap = shannon(views[i]) - shannon(views[j]).detach() + margin * math.log(len(whole))
                    losses.append(ranking * gap if gap > 0 else 0 * gap)
        descent.step(torch.autograd.grad(add_up(losses) / len(x), trained))
        predictions.append(torch.stack(rows))
    return predictions, student
