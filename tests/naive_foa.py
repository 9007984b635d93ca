"""An independent implementation of FOA and of CMA-ES with plain loops over images, tokens and matrix entries.

Only the normal numbers that candidates are made of come from the library, since both sides need the same.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from naive_entropy import shannon
from naive_vit import naive_attention, naive_norm
from numpy.typing import NDArray
from torch import Tensor

from ctta.testing.networks import BlockViT, ViTBlock

Vector = NDArray[np.float64]


class NaiveCMAES:
    """Hansen's tutorial (2016) with positive weights, entry by entry."""

    def __init__(self, n: int, population: int, sigma: float) -> None:
        self.n, self.sigma, self.steps, self.age = n, sigma, 0, 0
        parents = population // 2
        raw = [math.log((population + 1) / 2) - math.log(rank) for rank in range(1, parents + 1)]
        self.weights = [value / sum(raw) for value in raw]
        mass = 1 / sum(w * w for w in self.weights)
        self.mass, self.chi = mass, math.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n * n))
        self.c_sigma = (mass + 2) / (n + mass + 5)
        self.damping = 1 + 2 * max(0.0, math.sqrt((mass - 1) / (n + 1)) - 1) + self.c_sigma
        self.c_c = (4 + mass / n) / (n + 4 + 2 * mass / n)
        self.c_1 = 2 / ((n + 1.3) ** 2 + mass)
        self.c_mu = min(1 - self.c_1, 2 * (0.25 + mass - 2 + 1 / mass) / ((n + 2) ** 2 + mass))
        self.mean, self.path_sigma, self.path_c = np.zeros(n), np.zeros(n), np.zeros(n)
        self.covariance, self.root, self.inverse_root = np.eye(n), np.eye(n), np.eye(n)

    def ask(self, normal: Vector) -> list[Vector]:
        return [self.mean + self.sigma * self.root @ z for z in normal]

    def tell(self, candidates: list[Vector], fitness: list[float]) -> None:
        """Update; the last candidate is not one of :meth:`ask`."""
        steps = [(x - self.mean) / self.sigma for x in candidates]
        length = math.sqrt(float(((self.inverse_root @ steps[-1]) ** 2).sum()))
        longest = math.sqrt(self.n) + 2 * self.n / (self.n + 2)
        if length > longest:
            steps[-1] = steps[-1] * longest / length
        order = sorted(range(len(fitness)), key=lambda i: fitness[i])
        best = [steps[i] for i in order[: len(self.weights)]]
        mean_step = sum((w * y for w, y in zip(self.weights, best, strict=True)), np.zeros(self.n))
        self.steps += 1
        self.mean = self.mean + self.sigma * mean_step
        gain = math.sqrt(self.c_sigma * (2 - self.c_sigma) * self.mass)
        self.path_sigma = (1 - self.c_sigma) * self.path_sigma + gain * self.inverse_root @ mean_step
        norm = math.sqrt(float((self.path_sigma**2).sum()))
        is_short = norm / math.sqrt(1 - (1 - self.c_sigma) ** (2 * self.steps)) < (1.4 + 2 / (self.n + 1)) * self.chi
        self.path_c = (1 - self.c_c) * self.path_c
        if is_short:
            self.path_c = self.path_c + math.sqrt(self.c_c * (2 - self.c_c) * self.mass) * mean_step
        missing = 0.0 if is_short else self.c_c * (2 - self.c_c)
        for i in range(self.n):
            for j in range(self.n):
                value = (1 + self.c_1 * missing - self.c_1 - self.c_mu) * self.covariance[i, j]
                value += self.c_1 * self.path_c[i] * self.path_c[j]
                value += self.c_mu * sum(w * y[i] * y[j] for w, y in zip(self.weights, best, strict=True))
                self.covariance[i, j] = value
        self.sigma *= math.exp(min(1.0, self.c_sigma / self.damping * (norm / self.chi - 1)))
        self.age += 1
        if self.age > 1 / (self.c_1 + self.c_mu) / self.n / 10:
            values, vectors = np.linalg.eigh(self.covariance)
            self.root = vectors @ np.diag(values**0.5) @ vectors.T
            self.inverse_root = vectors @ np.diag(values**-0.5) @ vectors.T
            self.age = 0


def class_tokens(net: BlockViT, image: Tensor, prompts: Sequence[Tensor]) -> list[Tensor]:
    """Return the class token after each block, as the norm that comes next shows it."""
    patches = net.patch_embed(image.unsqueeze(0)).flatten(2)[0].T
    tokens = [net.cls_token[0, 0] + net.pos_embed[0, 0], *prompts]
    tokens += [patches[i] + net.pos_embed[0, i + 1] for i in range(len(patches))]
    blocks, found = list(net.blocks), []
    for number, block in enumerate(blocks):
        assert isinstance(block, ViTBlock)
        attended, _ = naive_attention(block, tokens)
        tokens = [token + change for token, change in zip(tokens, attended, strict=True)]
        tokens = [token + block.mlp(naive_norm(block.norm2, token)) for token in tokens]
        following = blocks[number + 1] if number + 1 < len(blocks) else None
        found.append(naive_norm(following.norm1 if isinstance(following, ViTBlock) else net.norm, tokens[0]))
    return found


def spread_and_mean(images: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the standard deviation (of n - 1) and the mean over images of all their tokens, end to end."""
    rows = [torch.cat(tokens) for tokens in images]
    mean = sum(rows[1:], rows[0]) / len(rows)
    squares = [(row - mean) ** 2 for row in rows]
    return (sum(squares[1:], squares[0]) / (len(rows) - 1)) ** 0.5, mean


@torch.no_grad()
def naive_foa(
    net: BlockViT,
    source_images: Tensor,
    batches: list[Tensor],
    *,
    first_prompts: Tensor,
    normal: Callable[[int], Vector],
    population: int,
    sigma: float,
    discrepancy: float,
    shift: float,
    decay: float,
) -> tuple[list[Tensor], NaiveCMAES, list[int]]:
    """Return the predictions, the search, and the number of the best candidate of each step."""
    num_prompts, width = first_prompts.shape
    search = NaiveCMAES(num_prompts * width, population, sigma)
    source_spread, source_mean = spread_and_mean([class_tokens(net, image, []) for image in source_images])
    best_prompts, history, winners, predictions = first_prompts.flatten().numpy(), None, [], []
    for step, x in enumerate(batches):
        candidates = [*search.ask(normal(step)), best_prompts]
        fitness, features = [], []
        for candidate in candidates:
            prompts = [torch.from_numpy(candidate)[i * width : (i + 1) * width] for i in range(num_prompts)]
            tokens = [class_tokens(net, image, prompts) for image in x]
            spread, mean = spread_and_mean(tokens)
            gap = ((spread - source_spread) ** 2).sum() + ((mean - source_mean) ** 2).sum()
            entropies = [shannon(net.head(each[-1])) for each in tokens]
            fitness.append(float(sum(entropies[1:], entropies[0]) + discrepancy * len(x) / 64 * gap))
            features.append([each[-1] for each in tokens])
        winner = min(range(len(fitness)), key=lambda i: fitness[i])
        target = source_mean[-width:]
        offset = torch.zeros(width) if history is None else shift * (target - history)
        predictions.append(torch.stack([net.head(feature + offset) for feature in features[winner]]))
        best_prompts = candidates[winner]
        winners.append(winner)
        search.tell(candidates, fitness)
        means = [torch.stack(rows).sum(0) / len(rows) for rows in features]
        mean = torch.stack(means).sum(0) / len(means)
        history = mean if history is None else decay * history + (1 - decay) * mean
    return predictions, search, winners
