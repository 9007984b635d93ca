"""Evaluate a method on a stream: predictions, metrics, results, and the journal that makes an evaluation resumable."""

from ctta.evaluation.comparison import Comparison, compare
from ctta.evaluation.intervals import Interval
from ctta.evaluation.journal import read_result
from ctta.evaluation.loop import evaluate
from ctta.evaluation.results import BatchRecord, Result

__all__ = ["BatchRecord", "Comparison", "Interval", "Result", "compare", "evaluate", "read_result"]
