"""Write your own method: store the hyperparameters under their names, implement one step, run the contract checks.

This one follows SHOT's idea: each prediction should be confident, and all of them together diverse.
"""

from functools import partial

import torch
from torch import Tensor, nn

import ctta
from ctta.functional import entropy


class InformationMaximization(ctta.AdaptiveModel):
    """Minimize the entropy of each prediction and maximize that of the mean prediction."""

    info = ctta.MethodInfo("InfoMax", trains="all weights", backward_passes=1, num_networks=2)

    def __init__(
        self,
        net: nn.Module,
        *,
        optimizer: ctta.OptimizerFactory = partial(torch.optim.SGD, lr=1e-2),
        lr: float | None = None,
        diversity: float = 1.0,
    ) -> None:
        super().__init__(net, lr=lr)
        self.diversity = diversity
        self.student = self.copy_of_source()
        self.optimize(self.student, optimizer)

    def adapt_step(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        mean = logits.softmax(1).mean(0, keepdim=True).log()
        self.minimize(entropy(logits).mean() - self.diversity * entropy(mean).mean())
        return logits

    def predict_step(self, x: Tensor) -> Tensor:  # optional: the inherited one copies the model
        logits: Tensor = self.student(x)
        return logits


torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(1568, 5))
model = InformationMaximization(net, diversity=0.5)
for _ in range(5):
    model(torch.rand(32, 3, 16, 16))
    assert model.last_step is not None
    print(f"step {model.num_steps}: loss {model.last_step.loss:.3f}")

classifier = {"convolution": lambda: nn.Sequential(nn.Conv2d(3, 6, 16), nn.BatchNorm2d(6), nn.Flatten())}
ctta.testing.check_method(InformationMaximization, networks=classifier)
print(f"InformationMaximization passes all {len(ctta.testing.CHECKS)} checks of the contract")
