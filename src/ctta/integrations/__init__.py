"""Integrations with other libraries: trackers, monitoring, Lightning, transformers.

:mod:`ctta.integrations.lightning` and :mod:`ctta.integrations.transformers` are imported by themselves, since they need
these libraries. Any tracker that is a function of values and a step works with :func:`log_steps`:

>>> import ctta, torch
>>> from ctta.integrations import log_steps
>>> net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
>>> model, logged = ctta.Tent(net), []
>>> handle = log_steps(model, lambda values, step: logged.append((step, sorted(values))))
>>> logits = model(torch.randn(16, 4))
>>> logged
[(1, ['batch_stats', 'confidence', 'is_empty', 'loss', 'scale', 'skipped'])]
>>> handle.remove()

:func:`export_to_prometheus` and :func:`export_to_opentelemetry` export the health of guarded models with the names of
their streams::

    export_to_prometheus({"camera7": model})
"""

from ctta.integrations.monitoring import export_to_opentelemetry, export_to_prometheus
from ctta.integrations.tracking import LogMetrics, log_steps, log_to_tensorboard, read_metrics

__all__ = [
    "LogMetrics",
    "export_to_opentelemetry",
    "export_to_prometheus",
    "log_steps",
    "log_to_tensorboard",
    "read_metrics",
]
