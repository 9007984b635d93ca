"""TRIBE, and statistics balanced over classes."""

from ctta.methods.tribe.method import TRIBE as TRIBE
