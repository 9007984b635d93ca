"""CMA-ES: minimize a function by sampling from a normal distribution that learns from the ranking of its samples.

>>> search = EvolutionStrategy(dimension=3, population=8, sigma=1.0)
>>> for step in range(60):
...     candidates = search.sample(torch.Generator().manual_seed(step))
...     search.update_(candidates, (candidates - 2).square().sum(1))
>>> [round(value, 2) for value in search.mean.tolist()]
[2.0, 2.0, 2.0]

Reference: Hansen, "The CMA evolution strategy: a tutorial", arXiv 1604.00772, with positive weights only.
"""

import math

import torch
from torch import Tensor

from ctta.core.state import CpuState
from ctta.core.validation import check_integer, check_positive


class EvolutionStrategy(CpuState):
    """A normal distribution over vectors, moved toward the best of its samples.

    Its state is a fixed number of buffers, 2 n² numbers for vectors of n entries. They stay in double precision on the
    CPU wherever the module is moved, since the covariance learns in steps that are smaller than the rounding of single
    precision.

    Attributes:
        mean: The mean of the distribution (n), zero at first.
        sigma: Its step size, a scalar.
        covariance: Its shape (n, n).
    """

    mean: Tensor
    sigma: Tensor
    covariance: Tensor
    weights: Tensor
    step_path: Tensor
    shape_path: Tensor
    axes: Tensor
    lengths: Tensor
    _num_updates: Tensor
    _age: Tensor

    @torch.inference_mode(False)
    def __init__(self, dimension: int, population: int, sigma: float) -> None:
        super().__init__()
        check_positive("sigma", sigma)
        self.population, n = check_integer("population", population, 2), dimension
        self.dimension = n
        ranks = torch.arange(1, population // 2 + 1, dtype=torch.float64)
        weights = math.log((population + 1) / 2) - ranks.log()
        weights /= weights.sum()
        mass = self._mass = float(1 / weights.square().sum())
        self._step_rate = (mass + 2) / (n + mass + 5)
        self._damping = 1 + 2 * max(0.0, math.sqrt((mass - 1) / (n + 1)) - 1) + self._step_rate
        self._shape_rate = (4 + mass / n) / (n + 4 + 2 * mass / n)
        self._rate_one = 2 / ((n + 1.3) ** 2 + mass)
        self._rate_mu = min(1 - self._rate_one, 2 * (0.25 + mass - 2 + 1 / mass) / ((n + 2) ** 2 + mass))
        self._expected_length = math.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n**2))
        self.register_buffer("weights", weights, persistent=False)
        self.register_buffer("mean", torch.zeros(n, dtype=torch.float64))
        self.register_buffer("sigma", torch.tensor(float(sigma), dtype=torch.float64))
        self.register_buffer("step_path", torch.zeros(n, dtype=torch.float64))
        self.register_buffer("shape_path", torch.zeros(n, dtype=torch.float64))
        self.register_buffer("covariance", torch.eye(n, dtype=torch.float64))
        self.register_buffer("axes", torch.eye(n, dtype=torch.float64))
        self.register_buffer("lengths", torch.ones(n, dtype=torch.float64))
        self.register_buffer("_num_updates", torch.zeros((), dtype=torch.long))
        self.register_buffer("_age", torch.zeros((), dtype=torch.long))

    @property
    def num_updates(self) -> int:
        """How many samples the distribution has learned from."""
        return int(self._num_updates)

    @torch.no_grad()
    def sample(self, generator: torch.Generator) -> Tensor:
        """Draw candidates (population, n) in double precision, without changing anything."""
        normal = torch.randn(self.population, self.dimension, generator=generator, dtype=torch.float64)
        return self.mean + self.sigma * self._scale_axes(normal, self.lengths)

    @torch.no_grad()
    def update_(self, candidates: Tensor, fitness: Tensor, *, num_injected: int = 0) -> None:
        """Learn from candidates (k, n): a sample, and then ``num_injected`` others, of which far ones count as nearer.

        The fitness (k) is minimized; it must be finite, and only its order matters.
        """
        steps = (candidates.to(self.mean) - self.mean) / self.sigma
        if num_injected:
            steps[-num_injected:] = self._limit_length(steps[-num_injected:])
        best = steps[fitness.to(self.mean).argsort(stable=True)[: len(self.weights)]]
        step = self.weights @ best
        self._num_updates += 1
        self.mean += self.sigma * step
        gain = math.sqrt(self._step_rate * (2 - self._step_rate) * self._mass)
        self.step_path.mul_(1 - self._step_rate).add_(self._scale_axes(step, 1 / self.lengths), alpha=gain)
        length = float(self.step_path.norm()) / self._expected_length
        settled = math.sqrt(1 - (1 - self._step_rate) ** (2 * self.num_updates))
        # A path that is too long is still due to the step size, which has to grow first.
        is_settled = length / settled < 1.4 + 2 / (self.dimension + 1)
        variance_kept = self._shape_rate * (2 - self._shape_rate)
        self.shape_path.mul_(1 - self._shape_rate).add_(step, alpha=is_settled * math.sqrt(variance_kept * self._mass))
        kept = 1 - self._rate_one - self._rate_mu + (not is_settled) * self._rate_one * variance_kept
        self.covariance.mul_(kept).addr_(self.shape_path, self.shape_path, alpha=self._rate_one)
        self.covariance.addmm_(best.T * self.weights, best, alpha=self._rate_mu)
        self.sigma *= math.exp(min(1.0, self._step_rate / self._damping * (length - 1)))
        self._age += 1
        if int(self._age) > 1 / (self._rate_one + self._rate_mu) / self.dimension / 10:
            self._decompose_()

    def _scale_axes(self, vectors: Tensor, factors: Tensor) -> Tensor:
        """Return vectors (..., n) scaled along the axes of the distribution; the result knows no signs of axes."""
        return ((vectors @ self.axes) * factors) @ self.axes.T

    def _limit_length(self, steps: Tensor) -> Tensor:
        """Return steps (k, n) no longer, in terms of the distribution, than a sample may be."""
        longest = math.sqrt(self.dimension) + 2 * self.dimension / (self.dimension + 2)
        lengths: Tensor = self._scale_axes(steps, 1 / self.lengths).norm(dim=1, keepdim=True)
        return steps * (longest / lengths.clamp_min(longest))

    def _decompose_(self) -> None:
        """Compute the axes of the distribution anew; in many dimensions the covariance moves slowly, and this waits."""
        self.covariance.add_(self.covariance.T.clone()).div_(2)
        variances, axes = torch.linalg.eigh(self.covariance)
        self.lengths.copy_(variances.clamp_min(torch.finfo(variances.dtype).tiny).sqrt())
        self.axes.copy_(axes)
        self._age.zero_()
