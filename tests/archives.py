"""Small tar archives, good and bad."""

import io
import tarfile

Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, content: bytes = b"1", **fields: object) -> Member:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> Member:
    return member(name, b"", type=kind, linkname=target)


def archive(*members: Member, mode: str = "w") -> bytes:
    with tarfile.open(fileobj=(buffer := io.BytesIO()), mode=mode) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
