"""PALM, and the learning rates that it sets by sensitivity."""

from ctta.methods.palm.method import PALM as PALM
