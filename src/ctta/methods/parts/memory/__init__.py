"""Memories of past images, balanced over the predicted classes, and the methods that learn from one.

A memory is a fixed number of slots. It decides which slot, if any, an arriving image takes; every image has the class
and the uncertainty that the method predicted when it arrived. On several processes all of them hold the same memory
and compute the same updates.
"""

from ctta.methods.parts.memory.memories import (
    ConfidentMemory,
    LatestMemory,
    Memory,
    ReservoirMemory,
    Slots,
    TimelyMemory,
    predicted_classes,
    prediction_uncertainty,
)
from ctta.methods.parts.memory.model import MemoryModel

__all__ = [
    "ConfidentMemory",
    "LatestMemory",
    "Memory",
    "MemoryModel",
    "ReservoirMemory",
    "Slots",
    "TimelyMemory",
    "predicted_classes",
    "prediction_uncertainty",
]
