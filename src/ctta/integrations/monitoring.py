"""Export the health of streams to Prometheus or OpenTelemetry, so that an alert names the stream."""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from ctta.guard import Health

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import GaugeMetricFamily

#: Fields of :class:`~ctta.guard.Health` that are exported as ``ctta_stream_...``, with their descriptions.
HEALTH_METRICS = {
    "collapse_score": "Score of the last inspected batch; 1 or more is an alarm.",
    "confidence": "Mean confidence in the last batch.",
    "estimated_gain": "Estimated accuracy above that without adaptation, a fraction.",
    "estimated_gain_low": "Lower end of the interval of the estimated gain.",
    "estimated_gain_high": "Upper end of the interval of the estimated gain.",
}


class HasHealth(Protocol):
    """What is exported: a guarded model, or anything else with a health."""

    @property
    def health(self) -> Health:
        """The health after the last batch."""


MAX_STREAMS = 100  # with metrics of their own; names of streams may come from clients

#: What lists streams: their names with their health as a mapping, the most important first.
ListHealth = Callable[[], Iterable[tuple[str, Mapping[str, Any]]]]


class HealthCollector:
    """Collect the health of at most a hundred streams for Prometheus: those in trouble, then the others in order.

    Args:
        list_health: Lists the streams.
    """

    def __init__(self, list_health: ListHealth) -> None:
        self.list_health = list_health

    def collect(self) -> "Iterable[GaugeMetricFamily]":
        """Return one family per metric, with the stream as its label."""
        from prometheus_client.core import GaugeMetricFamily

        streams = _select(self.list_health())
        for name, text in HEALTH_METRICS.items():
            family = GaugeMetricFamily(f"ctta_stream_{name}", text, labels=["stream"])
            for stream, health in streams:
                if (value := health.get(name)) is not None:
                    family.add_metric([stream], float(value))
            yield family


def export_to_prometheus(
    models: Mapping[str, HasHealth], registry: "CollectorRegistry | None" = None
) -> HealthCollector:
    """Export the health of guarded models, which is read whenever Prometheus asks.

    ``prometheus_client.start_http_server(9100)`` then answers as ``ctta serve`` does at ``/metrics``.

    Args:
        models: Guarded models by the names of their streams; streams may be added to it later.
        registry: Where to register; by default the registry of the process.

    Returns:
        The collector, for ``registry.unregister``.

    Raises:
        ImportError: prometheus_client is not installed.

    >>> import ctta
    >>> from prometheus_client import CollectorRegistry, generate_latest
    >>> registry, model = CollectorRegistry(), ctta.Guarded(ctta.Tent(ctta.models.embedded()))
    >>> collector = export_to_prometheus({"camera7": model}, registry)
    >>> 'ctta_stream_collapse_score{stream="camera7"} 0.0' in generate_latest(registry).decode()
    True
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError as missing:
        raise ImportError("the export needs prometheus_client: pip install prometheus-client") from missing
    collector = HealthCollector(_list_models(models))
    (registry or REGISTRY).register(collector)
    return collector


def export_to_opentelemetry(models: Mapping[str, HasHealth], meter: Any) -> None:
    """Export the health of guarded models, which is read whenever the meter's reader asks.

    Args:
        models: Guarded models by the names of their streams; streams may be added to it later.
        meter: A meter, as ``opentelemetry.metrics.get_meter("cameras")`` returns it.

    Raises:
        ImportError: opentelemetry-api is not installed.
    """
    try:
        from opentelemetry.metrics import Observation
    except ImportError as missing:
        raise ImportError("the export needs opentelemetry-api: pip install opentelemetry-api") from missing

    def observe(name: str) -> Callable[[Any], Iterable[Any]]:
        def read(options: Any) -> Iterable[Any]:
            for stream, health in _select(_list_models(models)()):
                if (value := health.get(name)) is not None:
                    yield Observation(float(value), {"stream": stream})

        return read

    for name, text in HEALTH_METRICS.items():
        meter.create_observable_gauge(f"ctta.stream.{name}", [observe(name)], description=text)


def _list_models(models: Mapping[str, HasHealth]) -> ListHealth:
    return lambda: [(name, model.health.as_dict()) for name, model in list(models.items())]


def _select(streams: Iterable[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return as many streams as are exported: those in trouble first, the others in their order."""
    return list(islice(sorted(streams, key=lambda each: not _is_in_trouble(each[1])), MAX_STREAMS))


def _is_in_trouble(health: Mapping[str, Any]) -> bool:
    high = health.get("estimated_gain_high")
    return (health.get("collapse_score") or 0.0) >= 1 or (high is not None and high < 0)
