"""Wrap a network, call it on a stream that drifts, and compare the errors with and without adaptation.

A small classifier learns the width of stripes. Then its camera drifts: darker, less contrast, noisier. All models see
the same unlabeled stream; labels are used only to score.
"""

import torch
from torch import Tensor, nn

import ctta

NUM_CLASSES, SIZE = 4, 16


def draw_stripes(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return color images with stripes of one of four widths, in any direction, and their labels."""
    label = torch.randint(NUM_CLASSES, (count,), generator=generator)
    waves = 0.5 * 1.5 ** label.view(-1, 1, 1)
    angle, phase, *color = 7 * torch.rand(5, count, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    pattern = 0.5 + 0.4 * torch.sin(waves * (x * angle.cos() + y * angle.sin()) + phase)
    return pattern.unsqueeze(1) * (0.4 + 0.6 / 7 * torch.stack(color, 1)), label


def apply_drift(x: Tensor, drift: float, generator: torch.Generator) -> Tensor:
    """Return the images as a degrading camera takes them, for a drift from 0 to 1."""
    noise = torch.randn(x.shape, generator=generator)
    return (x * (1 - 0.85 * drift) + 0.4 * drift + 0.07 * drift * noise).clamp(0, 1)


def train(net: nn.Module, generator: torch.Generator) -> nn.Module:
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(150):
        x, label = draw_stripes(64, generator)
        nn.functional.cross_entropy(net(x), label).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.eval()


torch.manual_seed(0)
generator = torch.Generator().manual_seed(0)
layers = [nn.Conv2d(3, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU()]
net = train(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, NUM_CLASSES)), generator)

models = {name: ctta.adapt(net, name) for name in ("source", "bn_stats", "tent")}
models["cotta"] = ctta.CoTTA(net, views=ctta.views.image_views(8), decay=0.99)
print("error %    " + "".join(f"{name:>10}" for name in models))
for drift in (0.0, 0.25, 0.5, 0.75, 1.0):
    wrong = dict.fromkeys(models, 0)
    for _ in range(10):
        images, label = draw_stripes(50, generator)
        x = apply_drift(images, drift, generator)
        for name, model in models.items():
            wrong[name] += int((model(x).argmax(1) != label).sum())  # predicts and adapts
    print(f"drift {drift:4.2f} " + "".join(f"{count / 5:10.1f}" for count in wrong.values()))
