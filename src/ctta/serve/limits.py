"""How much the service takes on before it refuses."""

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """Caps, each with a default that suits one machine."""

    live_streams: int = 64  # in memory at once; the others wait on disk
    streams: int = 10_000  # in memory and on disk
    memory: int = 4 * 2**30  # bytes of all live streams, without the source that they share
    queue: int = 16  # requests that wait for one stream
    total_queue: int = 256  # requests that wait for all streams
    body: int = 16 * 2**20  # bytes of a request
    bodies: int = 128 * 2**20  # bytes of all requests at once
    batch: int = 256  # images of a request
    side: int = 2048  # pixels of an image, where the service has no size of its own
    picture: int = 32_000_000  # pixels of a picture file before it is resized
    seconds: float = 60.0  # until a request is given up
    connections: int = 512

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"the limit {field.name} must be positive, got {value!r}")
        if self.live_streams > self.streams:
            raise ValueError(f"{self.live_streams} live streams are more than the {self.streams} streams allowed")
