"""Which replica owns which stream: consistent hashing over the members of a view."""

import hashlib
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

NUM_POINTS = 128  # of each replica on the ring; with eight replicas, shares differ by about a tenth


@dataclass(frozen=True)
class View:
    """The replicas of a service at some time; two views with the same epoch are equal.

    Attributes:
        epoch: Number that grows with every change.
        members: Incarnation of each replica: a replica that dies and is restarted is another member.

    >>> before, after = View(1, {"a": "1", "b": "1"}), View(2, {"a": "1", "b": "1", "c": "1"})
    >>> streams = [f"camera{number}" for number in range(300)]
    >>> {after.owner(stream) for stream in streams if before.owner(stream) != after.owner(stream)}
    {'c'}
    """

    epoch: int = 0
    members: Mapping[str, str] = field(default_factory=dict)

    def owner(self, stream: str) -> str | None:
        """Return the replica that owns a stream; None without replicas."""
        if not self.members:
            return None
        places, names = _ring(tuple(sorted(self.members)))
        return names[bisect(places, _place(stream)) % len(names)]


def _place(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


@lru_cache(maxsize=8)
def _ring(members: tuple[str, ...]) -> tuple[list[int], list[str]]:
    """Return the places of the ring in order, and the replica that each belongs to."""
    points = sorted((_place(f"{name}#{number}"), name) for name in members for number in range(NUM_POINTS))
    return [place for place, _ in points], [name for _, name in points]
