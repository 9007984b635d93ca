"""How lists are typed on the command line."""

from ctta.streams.orders import TEN


def names(text: str | None) -> list[str] | None:
    """``a,b`` as a list."""
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def seeds(text: str | None) -> list[int] | None:
    """``1,2,3``, or ``1-5`` for a range.

    >>> seeds("1-3,7")
    [1, 2, 3, 7]
    """
    return None if text is None else [number for part in names(text) or [] for number in _numbers("seeds", part)]


def orders(text: str | None) -> list[int | None] | None:
    """``standard``, ``all`` (ten), or numbers as for seeds.

    >>> orders("standard,0-2")
    [None, 0, 1, 2]
    """
    if text is None:
        return None
    found: list[int | None] = []
    for part in names(text) or []:
        if part == "standard":
            found.append(None)
        elif part == "all":
            found.extend(range(len(TEN)))
        else:
            found.extend(_numbers("orders", part))
    return found


def _numbers(what: str, part: str) -> range:
    first, _, last = part.partition("-")
    try:
        return range(int(first), int(last or first) + 1)
    except ValueError:
        raise ValueError(f"{what} are whole numbers such as 1,2,3 or 1-5, got {part!r}") from None
