"""Counts for Prometheus. No label takes its values from users, so their number is bounded."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ctta.serve.stream import OVER_BUDGET, Answer

if TYPE_CHECKING:
    from ctta.serve.store import Store

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
#: Kinds of events that are told apart; a guard may know others.
KINDS = {
    *("new", "load", "delete", "reset", "soft_reset", "periodic_reset", "rollback", "freeze", "unfreeze", "refusal"),
    *("bad_rows", "skipped", "collapse", "recovery", "clumping", "shadow", "update skipped"),
}


class Metrics:
    """What was counted since the service began; one thread reads, and additions are small enough for several."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.seconds: dict[str, list[float]] = {}  # by route: how many in each bucket, then all, then their sum
        self.images: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.num_updates = 0
        self.num_over_budget = 0

    def count_request(self, method: str, route: str, status: int, seconds: float) -> None:
        self.requests[method, route, status] += 1
        row = self.seconds.setdefault(route, [0.0] * (len(BUCKETS) + 2))
        for place, bound in enumerate(BUCKETS):
            row[place] += seconds <= bound
        row[-2] += 1
        row[-1] += seconds

    def count_answer(self, answer: Answer, num_images: int) -> None:
        self.images["adapted" if answer.adapted else "predicted"] += num_images
        self.num_updates += answer.adapted
        self.num_over_budget += answer.reason == OVER_BUDGET

    def count_event(self, kind: str) -> None:
        self.events[kind if kind in KINDS else "other"] += 1

    def text(self, store: "Store") -> str:
        """In the format that Prometheus reads."""
        return "".join(self._lines(store))

    def _lines(self, store: "Store") -> Iterator[str]:
        yield from _family(
            "ctta_requests_total",
            "counter",
            "Requests answered.",
            (
                (f'{{method="{method}",route="{route}",status="{status}"}}', count)
                for (method, route, status), count in sorted(self.requests.items())
            ),
        )
        yield from self._durations()
        yield from _family("ctta_images_total", "counter", "Images answered.", _by("how", self.images))
        yield from _family("ctta_events_total", "counter", "Events of streams.", _by("kind", self.events))
        single = {
            "ctta_updates_total": ("counter", "Updates made.", self.num_updates),
            "ctta_updates_over_budget_total": (
                "counter",
                "Updates left out because the time for adapting was used up.",
                self.num_over_budget,
            ),
            "ctta_snapshot_failures_total": (
                "counter",
                "Snapshots that could not be written.",
                store.num_snapshot_failures,
            ),
            "ctta_streams": ("gauge", "Streams in memory and on disk.", len(store.entries)),
            "ctta_live_streams": ("gauge", "Streams in memory.", store.num_live),
            "ctta_live_bytes": ("gauge", "Memory of the live streams beside their source.", store.live_bytes),
            "ctta_waiting_requests": ("gauge", "Requests that wait or are worked on.", store.num_waiting),
            "ctta_alarmed_streams": ("gauge", "Streams whose collapse score is 1 or more.", store.num_alarmed),
        }
        for name, (kind, explanation, value) in single.items():
            yield from _family(name, kind, explanation, [("", value)])

    def _durations(self) -> Iterator[str]:
        name = "ctta_request_seconds"
        yield from _family(name, "histogram", "Time from a request to its answer.", [])
        for route, row in sorted(self.seconds.items()):
            for bound, count in zip((*BUCKETS, "+Inf"), row, strict=False):
                yield f'{name}_bucket{{route="{route}",le="{bound}"}} {count:g}\n'
            yield f'{name}_count{{route="{route}"}} {row[-2]:g}\n'
            yield f'{name}_sum{{route="{route}"}} {row[-1]:.6f}\n'


def _by(label: str, counts: Counter[str]) -> list[tuple[str, int]]:
    return [(f'{{{label}="{value}"}}', count) for value, count in sorted(counts.items())]


def _family(name: str, kind: str, explanation: str, samples: Iterable[tuple[str, float]]) -> Iterator[str]:
    yield f"# HELP {name} {explanation}\n# TYPE {name} {kind}\n"
    for labels, value in samples:
        yield f"{name}{labels} {value}\n"
