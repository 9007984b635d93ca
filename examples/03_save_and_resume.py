"""Save a stream and resume it later: the results equal those of the uninterrupted stream bit for bit."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

import ctta

torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
stream = [torch.rand(16, 3, 8, 8) for _ in range(10)]

uninterrupted = ctta.CoTTA(net, views=ctta.views.image_views(4), seed=7)
expected = [uninterrupted(x) for x in stream]

with TemporaryDirectory() as folder:
    path = Path(folder) / "camera7.safetensors"

    model: ctta.AdaptiveModel = ctta.CoTTA(net, views=ctta.views.image_views(4), seed=7)
    for x in stream[:5]:
        model(x)
    ctta.save(model, path)  # atomic: a reader sees the old file or the new one, never a part
    del model

    model = ctta.load(path, net)  # method, hyperparameters, weights, optimizer state and random draws
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} KB, resumed after {model.num_steps} steps")
    for x, logits in zip(stream[5:], expected[5:], strict=True):
        assert torch.equal(model(x), logits)
    print("the rest of the stream equals the uninterrupted run bit for bit")

    try:
        ctta.load(path, nn.Linear(3, 5))
    except ctta.CheckpointError as error:
        print(f"another network is rejected: {str(error).partition('.safetensors ')[2].partition(':')[0]}")
