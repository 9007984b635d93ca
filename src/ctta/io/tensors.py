"""Files of tensors that notice damage: safetensors with a JSON header and a checksum of every byte.

The checksum, a CRC-32, detects accidents (a bit that flipped, a sector that was lost), not forgery; a cryptographic
hash takes longer than a fast disk takes to write. Files are read by the safetensors library and written here, because
``safetensors.torch.save_file`` copies all tensors into bytes first, has no place for a checksum of them, and reports a
full disk as an exception that is not an ``OSError``.
"""

import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ctta.errors import DamagedCheckpointError

_CHECKSUM = '"crc32":"{}"'  # an entry of the metadata as the file has it
_NO_CHECKSUM = "0" * 8  # in the place of the checksum while it is computed
#: Names of data types in the file format.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], key: str, header: Any) -> None:
    """Write tensors and a header, which JSON can hold, to a file; the caller makes that atomic and durable.

    ``key`` is the name of the header in the metadata of the file.

    Raises:
        OSError: If the file cannot be written, for instance because the disk is full.
        TypeError: If the format has no name for the dtype of a tensor.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tensors(f"{folder}/a.safetensors", {"x": torch.ones(2)}, "stream", {"step": 3})
    ...     read_tensors(f"{folder}/a.safetensors", "stream")
    ({'step': 3}, {'x': tensor([1., 1.])})
    """
    # The largest elements first, so that every tensor is aligned in memory when the file is mapped.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in names:
        if (dtype := tensors[name].dtype) not in _DTYPES:
            raise TypeError(f"a file cannot hold '{name}' of {dtype}; expected one of {', '.join(map(str, _DTYPES))}")
    buffers = [to_bytes(tensors[name]) for name in names]
    entries: dict[str, Any] = {"__metadata__": {key: json.dumps(header), "crc32": _NO_CHECKSUM}}
    end = 0
    for name, buffer in zip(names, buffers, strict=True):
        start, end = end, end + len(buffer)
        entries[name] = {
            "dtype": _DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    entry = _CHECKSUM.format(_NO_CHECKSUM).encode()
    # The checksum is computed while the operating system copies the same bytes.
    with ThreadPoolExecutor(1) as pool, open(path, "wb") as file:
        checksum = pool.submit(_compute_checksum, text, *buffers)
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for buffer in buffers:
            file.write(buffer)
        file.seek(8 + text.index(entry))
        file.write(_CHECKSUM.format(checksum.result()).encode())


def read_tensors(path: str | os.PathLike[str], key: str) -> tuple[Any, dict[str, Tensor]]:
    """Return the header, if any, and the tensors of a file, after comparing its bytes with its checksum.

    Raises:
        DamagedCheckpointError: If the file is truncated, altered or not such a file.
        OSError: If the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            header = json.loads(metadata.get(key, "null"))
            # Copies, since the library maps the file: overwriting it in place would change or crash a running model.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is truncated or not a file of ctta: {error}") from error
    checksum = metadata.get("crc32")
    if checksum is None:
        raise DamagedCheckpointError(f"{path} is damaged: it has no checksum")
    if checksum != _compute_file_checksum(Path(path), checksum):
        raise DamagedCheckpointError(f"{path} is damaged: its content does not match its checksum")
    return header, tensors


def to_bytes(tensor: Tensor) -> memoryview:
    """Return the content of a tensor on any device: as bytes, because numpy does not support every dtype."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    content: memoryview = flat.view(torch.uint8).numpy().data
    return content


def _compute_checksum(*parts: bytes | memoryview) -> str:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return f"{checksum:08x}"


def _compute_file_checksum(path: Path, recorded: str) -> str:
    """Return the checksum of a file whose metadata has this one."""
    old, new = (_CHECKSUM.format(value).encode() for value in (recorded, _NO_CHECKSUM))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        (length,) = struct.unpack("<Q", content[:8])
        with memoryview(content) as view, view[8 + length :] as data:
            return _compute_checksum(content[8 : 8 + length].replace(old, new, 1), data)
