"""The common corruptions of CIFAR-C and ImageNet-C, applied to batches.

Reference: Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", ICLR 2019.
"""

from ctta.data.corruptions.registry import CORRUPTIONS, HOLD_OUT, OTHERS, VERSION, corrupt
from ctta.data.corruptions.writers import write_cifar_c, write_imagenet_c

__all__ = ["CORRUPTIONS", "HOLD_OUT", "OTHERS", "VERSION", "corrupt", "write_cifar_c", "write_imagenet_c"]
