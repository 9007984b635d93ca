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
    show_running_statistics as show_running_statistics,
    use_batch_statistics_ as use_batch_statistics_,
    use_running_statistics_ as use_running_statistics_,
    uses_batch_statistics as uses_batch_statistics,
)
from ctta.nn.context import (
    RecordedStatistics as RecordedStatistics,
    blend_statistics as blend_statistics,
    blend_with_recorded as blend_with_recorded,
    count_images as count_images,
    has_own_statistics_context as has_own_statistics_context,
    images_in_batch as images_in_batch,
    record_statistics as record_statistics,
    separate_statistics as separate_statistics,
    uses_recorded_statistics as uses_recorded_statistics,
)
from ctta.nn.norm import (
    NormHook as NormHook,
    avoid_group_norm_crash_ as avoid_group_norm_crash_,
    estimate_running_statistics_ as estimate_running_statistics_,
    find_norm_layers as find_norm_layers,
    find_norm_parameters as find_norm_parameters,
    has_running_statistics as has_running_statistics,
    make_contiguous_if_constant as make_contiguous_if_constant,
)
