"""VANE, and the parts that only it has."""

from ctta.methods.vane.method import VANE as VANE
