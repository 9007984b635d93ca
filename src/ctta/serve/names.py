"""Names that users give to streams, and the names of their folders."""

import re
import string

from ctta.serve.errors import Refusal

#: As a regular expression for Python and for the OpenAPI description alike.
PATTERN = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
#: The stream of a request that names none.
DEFAULT = "default"
_KEPT = string.ascii_lowercase + string.digits + "-"


def checked_name(name: str) -> str:
    """The name, or a refusal: it becomes a part of paths and of addresses."""
    if not re.fullmatch(PATTERN, name):
        raise Refusal(
            400,
            "a stream's name begins with a letter or digit and has up to 64 of these, dots, dashes and underscores",
        )
    return name


def folder_of(name: str) -> str:
    """A folder's name for each stream's name, different ones also where the file system takes A for a.

    >>> folder_of("Line.7")
    '_4cine_2e7'
    """
    return "".join(letter if letter in _KEPT else f"_{ord(letter):02x}" for letter in name)


def name_of(folder: str) -> str | None:
    """The stream whose folder this is; None for a folder that is none's.

    >>> name_of("_4cine_2e7")
    'Line.7'
    """
    name = re.sub("_([0-9a-f]{2})", lambda code: chr(int(code[1], 16)), folder)
    return name if re.fullmatch(PATTERN, name) and folder_of(name) == folder else None
