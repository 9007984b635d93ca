"""Save and load streams, exactly and without pickle."""

from ctta.checkpoint.files import load, save
from ctta.checkpoint.fingerprint import fingerprint
from ctta.errors import CheckpointError

__all__ = ["CheckpointError", "fingerprint", "load", "save"]
