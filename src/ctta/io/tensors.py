"""Files of tensors that notice damage: safetensors with a JSON header and a checksum of every byte.

The checksum, a CRC-32, detects accidents (a bit that flipped, a sector that was lost), not forgery; a cryptographic
hash takes longer than a fast disk takes to write. Files are opened here and parsed by the safetensors library, which
reports every error of the system as a missing file. They are written here, because ``safetensors.torch.save_file``
copies all tensors into bytes first, has no place for a checksum of them, and reports a full disk as an exception that
is not an ``OSError``.
"""

import io
import json
import os
import struct
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ctta.errors import DamagedCheckpointError

_CHECKSUM = '"crc32":"{}"'  # an entry of the metadata as the file has it
MAX_HEADER = 100_000_000  # bytes, as the safetensors library allows
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
    # The largest elements first, so that every tensor is aligned in memory where another library maps the file.
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
    with open(path, "rb") as file:
        content = file.read()
    try:
        tensors = safetensors.torch.load(content)  # checks the header as well
        metadata = _read_metadata(io.BytesIO(content))
        header = json.loads(metadata.get(key, "null"))
    except (SafetensorError, LookupError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is truncated or not a file of ctta: {error}") from error
    checksum = metadata.get("crc32")
    if checksum is None:
        raise DamagedCheckpointError(f"{path} is damaged: it has no checksum")
    if checksum != _compute_file_checksum(content, checksum):
        raise DamagedCheckpointError(f"{path} is damaged: its content does not match its checksum")
    return header, tensors


def read_header(path: str | os.PathLike[str], key: str) -> Any:
    """Return the header of a file without reading its tensors or comparing its checksum.

    Raises:
        DamagedCheckpointError: If the file has no such header.
        OSError: If the file cannot be read.
    """
    with open(path, "rb") as file:
        try:
            return json.loads(_read_metadata(file)[key])
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise DamagedCheckpointError(f"{path} is truncated or not a file of ctta: {error}") from error


def _read_metadata(file: BinaryIO) -> dict[str, str]:
    (length,) = struct.unpack("<Q", file.read(8).rjust(8, b"\xff"))
    header = json.loads(file.read(length) if length < MAX_HEADER else b"")
    metadata: dict[str, str] = header.get("__metadata__") or {}
    return metadata


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


def _compute_file_checksum(content: bytes, recorded: str) -> str:
    """Return the checksum of a file whose metadata has this one."""
    old, new = (_CHECKSUM.format(value).encode() for value in (recorded, _NO_CHECKSUM))
    (length,) = struct.unpack("<Q", content[:8])
    return _compute_checksum(content[8 : 8 + length].replace(old, new, 1), memoryview(content)[8 + length :])
