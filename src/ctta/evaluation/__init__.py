"""Evaluate a method on a stream: predictions, metrics, results and the journal that makes a run resumable."""

from ctta.evaluation.evaluate import evaluate
from ctta.evaluation.results import Result

__all__ = ["Result", "evaluate"]
