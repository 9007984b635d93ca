"""PETAL, and the posterior over the source's weights."""

from ctta.methods.petal.method import PETAL as PETAL
