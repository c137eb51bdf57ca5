"""Owns how flat series become the Prometheus text format.

Knows nothing of what the numbers mean; keys that are not in the table are left out.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from firstlight.metrics.table import METRICS, PREFIX, Metric

Flat = Mapping[str, float]
Read = Callable[[], Iterable[Flat]]


class SeriesCollector(Collector):
    """Reads flat series at each scrape and gives families; of equal keys the last stands."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        """Gives one family for each metric that has a number."""
        merged: dict[str, float] = {}
        for flat in self._read():
            merged.update(flat)
        grouped: dict[str, dict[str, float]] = {}
        for key, value in merged.items():
            name = key.partition("/")[0].partition(".")[0]
            grouped.setdefault(name, {})[key] = value
        for metric in METRICS.values():
            if metric.name in grouped:
                yield _family(metric, grouped[metric.name])


class Exposition:
    """The text a scraper gets, from a registry of its own."""

    def __init__(self, read: Read) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(SeriesCollector(read))

    def render(self) -> bytes:
        """Writes the text format, version 0.0.4."""
        return generate_latest(self._registry)


def _family(metric: Metric, flat: Flat) -> Family:
    name = PREFIX + metric.name
    if metric.kind == "histogram":
        return _histogram(name, metric, flat)
    family: CounterMetricFamily | GaugeMetricFamily
    if metric.kind == "counter":
        family = CounterMetricFamily(name.removesuffix("_total"), metric.help, labels=metric.labels)
    else:
        family = GaugeMetricFamily(name, metric.help, labels=metric.labels)
    for key, value in sorted(flat.items()):
        family.add_metric(key.split("/", len(metric.labels))[1:], value)
    return family


def _histogram(name: str, metric: Metric, flat: Flat) -> Family:
    family = HistogramMetricFamily(name, metric.help, labels=())
    start = f"{metric.name}.bucket/"
    bounds = sorted((float(key.removeprefix(start)), key) for key in flat if key.startswith(start))
    buckets = [
        ("+Inf" if bound == float("inf") else str(bound), flat[key]) for bound, key in bounds
    ]
    family.add_metric([], buckets, sum_value=flat.get(f"{metric.name}.sum", 0.0))
    return family
