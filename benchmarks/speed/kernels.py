"""Kernels and host reads of a step on an accelerator, beside the kernels of its bare passes.

    PYTHONPATH=tests python -m benchmarks.speed.kernels

Counted on the simulated accelerator of the tests, so that the numbers are the same on every machine: the embedded
ResNet-20, batches of 16 sample images, the mean of eight steps after four. Bare passes are the forward and backward
passes that the step made, each with the kernels of the network alone. Prints a Markdown table.
"""

import copy
from collections.abc import Callable

import accelerator
import numpy as np
import torch
from torch import Tensor, nn

import ctta
from benchmarks.speed.baseline import use_batch_statistics_
from ctta.data.datasets import sample
from ctta.evaluation.steps import count_passes
from ctta.nn import find_norm_parameters
from ctta.nn.surgery import train_only_

METHODS = ("source", "bn_stats", "tent", "cotta", "cotta_fast", "vane", "vane_fast")
BATCH_SIZE, NUM_BEFORE, NUM_STEPS = 16, 4, 8


def find_trained(model: ctta.AdaptiveModel) -> set[str]:
    """Return the names of the parameters that a method trains; those of norm layers if it trains none."""
    names = {name for net in model.trained_networks for name, value in net.named_parameters() if value.requires_grad}
    return names or find_norm_parameters(model.copy_of_source())


def count_kernels(call: Callable[[], object]) -> int:
    """Return how many kernels a call launches."""
    with accelerator.count() as counts:
        call()
    return counts.kernels


def count_bare(net: nn.Module, x: Tensor, trained: set[str]) -> tuple[int, int]:
    """Return the kernels of a forward pass on batch statistics, and of a backward pass to some parameters."""
    net = use_batch_statistics_(copy.deepcopy(net))
    train_only_(net, trained)
    loss = net(x).sum()
    with torch.no_grad():
        forward = count_kernels(lambda: net(x))
    return forward, count_kernels(loss.backward)


def main() -> None:
    """Print the table."""
    pixels = torch.from_numpy(np.ascontiguousarray(sample().images[: (NUM_BEFORE + NUM_STEPS) * BATCH_SIZE]))
    batches = (pixels.permute(0, 3, 1, 2).float() / 255).to("sim").split(BATCH_SIZE)
    net = ctta.models.embedded().to("sim")
    print("| method | host reads | guarded | kernels | of bare passes | ratio |\n|---|---:|---:|---:|---:|---:|")
    for name in METHODS:
        model, guarded = ctta.adapt(net, name), ctta.Guarded(ctta.adapt(net, name))
        forward, backward = count_bare(net, batches[0], find_trained(model))
        for x in batches[:NUM_BEFORE]:
            model(x), guarded(x)
        with count_passes(type(model.source)) as passes, accelerator.count() as counts:
            for x in batches[NUM_BEFORE:]:
                model(x)
        with accelerator.count() as guarded_counts:
            for x in batches[NUM_BEFORE:]:
                guarded(x)
        bare = (passes.forward * forward + passes.backward * backward) / (BATCH_SIZE * NUM_STEPS)
        reads, kernels = counts.host_reads / NUM_STEPS, counts.kernels / NUM_STEPS
        guarded_reads = guarded_counts.host_reads / NUM_STEPS
        print(f"| {name} | {reads:.1f} | {guarded_reads:.1f} | {kernels:.0f} | {bare:.0f} | {kernels / bare:.2f} |")


if __name__ == "__main__":
    main()
