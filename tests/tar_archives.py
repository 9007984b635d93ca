"""Small tar archives in memory, valid and malicious."""

import gzip
import io
import tarfile

Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, content: bytes = b"1", **fields: object) -> Member:
    """Return a file of an archive; ``fields`` are set on its ``TarInfo``."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> Member:
    """Return a symbolic or hard link of an archive."""
    return member(name, b"", type=kind, linkname=target)


def archive(*members: Member, compressed: bool = False) -> bytes:
    """Return the bytes of a tar archive, gzip-compressed if asked for."""
    with tarfile.open(fileobj=(buffer := io.BytesIO()), mode="w") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return gzip.compress(buffer.getvalue()) if compressed else buffer.getvalue()
