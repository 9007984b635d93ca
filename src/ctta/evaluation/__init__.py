"""Evaluate a method on a stream: predictions, metrics, results, and the journal that makes an evaluation resumable."""

from ctta.evaluation.evaluate import evaluate
from ctta.evaluation.results import BatchRecord, Result, read_result

__all__ = ["BatchRecord", "Result", "evaluate", "read_result"]
