"""FOA: prompts of a vision transformer, and the evolution strategy that learns them."""

from ctta.methods.foa.method import FOA as FOA
