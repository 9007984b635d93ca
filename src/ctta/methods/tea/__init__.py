"""TEA, and the buffer of images that it draws from."""

from ctta.methods.tea.method import TEA as TEA
