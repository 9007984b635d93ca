"""Predicted label maps, kept beside their scores so that people can look at what adapting changed."""

from ctta.evaluation.label_maps.choosing import write_examples
from ctta.evaluation.label_maps.example import Example, read_examples
from ctta.evaluation.label_maps.keeping import keep_label_maps

__all__ = ["Example", "keep_label_maps", "read_examples", "write_examples"]
