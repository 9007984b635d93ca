"""Prometheus metrics of a service. Only some streams have metrics of their own, so that their number is bounded."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from typing_extensions import override

from ctta.guard import EventKind
from ctta.integrations.monitoring import HealthCollector, ListHealth
from ctta.serve.audit import StreamEvent

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
#: Kinds of events with a count of their own; others are counted as "other".
EVENT_KINDS = {*StreamEvent, *EventKind}


class ServiceMetrics:
    """Counters of one service, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ctta_{name}", text, labels, registry=self.registry)

        self.requests = counter("requests", "Requests answered.", "method", "route", "status")
        self.request_duration = Histogram(
            "ctta_request_duration_seconds",
            "Time from a request to its answer.",
            ["route"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        self.failures = counter("failures", "Failures inside a network or the service.", "cause")
        self.images = counter("images", "Images answered.", "mode")
        self.events = counter("events", "Events of streams.", "kind")
        self.updates = counter("updates", "Updates made.")
        self.updates_over_budget = counter("updates_over_budget", "Updates skipped for lack of time budget.")
        self.snapshot_failures = counter("snapshot_failures", "Snapshots that could not be written.")
        self.audit_failures = counter("audit_failures", "Events that could not be written to the audit log.")

    def add_streams(self, list_health: ListHealth) -> None:
        """Add the health of streams, as it is when the metrics are read."""
        self.registry.register(HealthCollector(list_health))

    def count_event(self, kind: str) -> None:
        """Count an event of a stream by its kind."""
        self.events.labels(kind if kind in EVENT_KINDS else "other").inc()

    def count_failure(self, cause: str) -> None:
        """Count a failure that is not the client's fault: ``"out_of_memory"``, ``"disk"`` or ``"internal"``."""
        self.failures.labels(cause).inc()


class _Families(Collector):
    """Metrics that exist already."""

    def __init__(self) -> None:
        self.by_name: dict[str, Metric] = {}

    @override
    def collect(self) -> Iterable[Metric]:
        return self.by_name.values()


def merge_metrics(texts: Mapping[str, str], label: str) -> bytes:
    """Return the metrics of several processes as one text, in which a label tells the processes apart."""
    families, registry = _Families(), CollectorRegistry()
    for process, text in texts.items():
        for family in text_string_to_metric_families(text):
            merged = families.by_name.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += [each._replace(labels={**each.labels, label: process}) for each in family.samples]
    registry.register(families)
    return generate_latest(registry)
