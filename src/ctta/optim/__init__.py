"""Optimizers: how they are built, how they step, and how their state is stored."""

from ctta.optim.factories import OptimizerFactory, build_optimizer, with_lr
from ctta.optim.state import load_state_, restore_state_, split_state
from ctta.optim.steps import (
    all_finite,
    batch_gradients,
    compute_gradients_,
    scale_rates,
    scale_steps,
    sharpness_aware_step_,
    split_groups_,
    step_if_finite_,
)

__all__ = [
    "OptimizerFactory",
    "all_finite",
    "batch_gradients",
    "build_optimizer",
    "compute_gradients_",
    "load_state_",
    "restore_state_",
    "scale_rates",
    "scale_steps",
    "sharpness_aware_step_",
    "split_groups_",
    "split_state",
    "step_if_finite_",
    "with_lr",
]
