"""What is done to a copied network: norm layers and their statistics, heads, top layers, compilation, memory."""

# An alias of the same name re-exports; isort would give each a statement of its own.
# isort: off
from ctta.nn.norm import (
    FULL_BATCH_SIZE as FULL_BATCH_SIZE,
    PRIOR_SIZE as PRIOR_SIZE,
    BatchStatistics as BatchStatistics,
    BatchStats as BatchStats,
    TracedCall as TracedCall,
    automatic_fraction as automatic_fraction,
    batch_fraction as batch_fraction,
    blends_automatically as blends_automatically,
    prepare_traced_call as prepare_traced_call,
    renormalize as renormalize,
    unmask_running_statistics as unmask_running_statistics,
    use_batch_statistics_ as use_batch_statistics_,
    use_running_statistics_ as use_running_statistics_,
    uses_batch_statistics as uses_batch_statistics,
    NormHook as NormHook,
    attach_norm_hooks_ as attach_norm_hooks_,
    estimate_running_statistics_ as estimate_running_statistics_,
    find_norm_layers as find_norm_layers,
    find_norm_parameters as find_norm_parameters,
    has_batch_norm as has_batch_norm,
    has_running_statistics as has_running_statistics,
)
