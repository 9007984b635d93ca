"""Prometheus metrics of a service. No label takes its values from clients, so their number is bounded."""

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from ctta.guard import EventKind
from ctta.serve.audit import StreamEvent

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")
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

    def add_gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge that is read whenever the metrics are.

        Args:
            name: Name without the prefix ``ctta_``.
            text: Its description.
            value: Returns the current value.
        """
        Gauge(f"ctta_{name}", text, registry=self.registry).set_function(value)

    def count_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request.

        Args:
            method: HTTP method.
            route: Path template of the route, not the path that the client sent.
            status: HTTP status of the answer.
            seconds: Time that the answer took.
        """
        self.requests.labels(method if method in METHODS else "other", route, str(status)).inc()
        self.request_duration.labels(route).observe(seconds)

    def count_event(self, kind: str) -> None:
        """Count an event of a stream by its kind."""
        self.events.labels(kind if kind in EVENT_KINDS else "other").inc()

    def count_failure(self, cause: str) -> None:
        """Count a failure that is not the client's fault.

        Args:
            cause: ``"out_of_memory"``, ``"disk"`` or ``"internal"``.
        """
        self.failures.labels(cause).inc()

    def render(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)


class MetricsMiddleware:
    """Count every request by its route, and forbid browsers to guess the type of an answer.

    Args:
        app: The application.
        metrics: What counts.
    """

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 500

        async def send_and_observe(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((b"x-content-type-options", b"nosniff"))
            await send(message)

        try:
            await self.app(scope, receive, send_and_observe)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self.metrics.count_request(scope["method"], route, status, time.monotonic() - started)


class _Families(Collector):
    """Metrics that exist already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    @override
    def collect(self) -> Iterable[Metric]:
        return self._families


def merge_metrics(texts: Mapping[str, str], label: str) -> bytes:
    """Return the metrics of several processes as one text.

    Args:
        texts: Metrics of each process in the text format of Prometheus.
        label: Name of the label that tells the processes apart.

    Returns:
        All of them.
    """
    families: dict[str, Metric] = {}
    for process, text in texts.items():
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.samples.append(sample._replace(labels={**sample.labels, label: process}))
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry)
