"""Request bodies that clients send compressed."""

import zlib
from collections.abc import Iterator

from ctta.serve.errors import ApiError

#: Supported values of Content-Encoding, with the format for zlib.
WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
PIECE = 2**20  # bytes that are expanded at once, in a millisecond


class Decompressor:
    """Expand a body piece by piece, so that its reader can stop at a limit.

    Args:
        encoding: Value of the header Content-Encoding.

    Raises:
        ApiError: With status 415 if the encoding is not supported.

    >>> import gzip
    >>> decompressor = Decompressor("gzip")
    >>> b"".join(decompressor.expand(gzip.compress(b"body")))
    b'body'
    >>> decompressor.finish()
    """

    def __init__(self, encoding: str) -> None:
        if encoding not in WINDOW_BITS:
            known = ", ".join(WINDOW_BITS)
            raise ApiError(415, f"Content-Encoding {encoding[:40]!r} is not supported: use one of {known}, or none")
        self.encoding = encoding
        self._stream = zlib.decompressobj(WINDOW_BITS[encoding])

    def expand(self, data: bytes) -> Iterator[bytes]:
        """Yield what a part of the body expands to, in pieces of limited size.

        Args:
            data: The next part.

        Raises:
            ApiError: With status 400 if the body is damaged.
        """
        try:
            while data:
                if self._stream.eof:
                    self._start_next()
                yield self._stream.decompress(data, PIECE)
                data = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail
            while piece := self._stream.decompress(b"", PIECE):
                yield piece
        except zlib.error as error:
            raise ApiError(400, f"the body is not valid {self.encoding}: {error}") from error

    def _start_next(self) -> None:
        if self.encoding != "gzip":
            raise ApiError(400, f"there are bytes after the end of the {self.encoding} body")
        self._stream = zlib.decompressobj(WINDOW_BITS[self.encoding])  # a gzip file may have several members

    def finish(self) -> None:
        """Raise unless the body was complete.

        Raises:
            ApiError: With status 400.
        """
        if not self._stream.eof:
            raise ApiError(400, f"the {self.encoding} body is truncated")
