"""Tensors in safetensors files."""

import os
import re
from collections.abc import Mapping

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str]) -> None:
    """Write tensors to a safetensors file.

    Args:
        tensors: Contiguous tensors by name, without shared memory.
        path: The file.
        metadata: Strings for the header of the file.

    Raises:
        OSError: If the file cannot be written, for example because the disk is full. safetensors raises an exception
            that is none, so that callers who handle errors of the disk would miss it.
    """
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), os.fspath(path)) from error
        raise
