"""DELTA, and batch renormalization."""

from ctta.methods.delta.method import DELTA as DELTA
