"""Evaluate a method on a stream: predictions, metrics, results, and the journal that makes an evaluation resumable."""

from ctta.evaluation.compare import compare
from ctta.evaluation.comparison import Comparison
from ctta.evaluation.evaluate import evaluate
from ctta.evaluation.intervals import Interval
from ctta.evaluation.reading import read_result
from ctta.evaluation.results import BatchRecord, Result

__all__ = ["BatchRecord", "Comparison", "Interval", "Result", "compare", "evaluate", "read_result"]
