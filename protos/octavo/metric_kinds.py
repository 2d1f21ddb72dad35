"""How metrics are made: declared once, told to Prometheus, and described in a table.

`Metrics` is the base of each service's set. Everything that it makes is also noted as a
`MetricSpec`, from which the documentation is generated. Label values that are known beforehand
start at 0: a rate sees their first increase. Must not know: any service, any metric's meaning.
Entry points: `Metrics`, `Tally`, `Exemplar`.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, product
from typing import Any, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as _Exemplar

import octavo

# Fine enough for inter-token times of 1 ms, wide enough for a minute's queue.
LATENCY_BUCKETS_S = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04),
    *(0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0),
)
STEP_BUCKETS_S = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
TOKEN_BUCKETS = tuple(1 << power for power in range(18))
# The last words of names that say a unit; what has none counts things.
_UNITS = ("seconds", "bytes", "ratio", "tokens", "blocks", "steps")

# A sampled trace, as {"trace_id": ...}: what made a value. None where there is none.
Exemplar = dict[str, str] | None
# Label names with their values; an empty tuple = values that only time tells.
Labels = Mapping[str, Sequence[str]]
_NO_LABELS: Labels = {}


class MetricSpec(NamedTuple):
    """A metric as documented; `name` is what queries say (histograms add _bucket and so on)."""

    name: str
    kind: str
    unit: str
    labels: Labels
    text: str


class Tally(Collector):
    """A histogram for what happens once per token or step: plain counts, rendered when scraped.

    An `observe` costs a tenth of Histogram's, which locks three times; so one thread only.
    """

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name, self._text = name, text
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._exemplars: dict[int, _Exemplar] = {}
        self._sum = 0.0

    def observe(self, value: float, exemplar: Exemplar = None) -> None:
        place = bisect_left(self._bounds, value)
        self._counts[place] += 1
        self._sum += value
        if exemplar is not None:
            self._exemplars[place] = _Exemplar(exemplar, value, time.time())

    def collect(self) -> Iterable[Metric]:
        bounds = [*map(str, map(float, self._bounds)), "+Inf"]
        buckets: list[tuple[str, float] | tuple[str, float, _Exemplar]] = []
        for place, (bound, total) in enumerate(zip(bounds, accumulate(self._counts), strict=True)):
            exemplar = self._exemplars.get(place)
            buckets.append((bound, total) if exemplar is None else (bound, total, exemplar))
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum)


class _Sampled(Collector):
    """Gauges whose values are looked up together when scraped; without any they aren't there.

    `columns`: what each gauge takes from a reading, None = nothing. `read` gives the label values
    and the reading of each thing that there is now.
    """

    def __init__(
        self,
        columns: Sequence[tuple[MetricSpec, Callable[[Any], float | None]]],
        read: Callable[[], Iterable[tuple[Sequence[str], Any]]],
    ) -> None:
        self._columns, self._read = columns, read

    def collect(self) -> Iterable[Metric]:
        readings = list(self._read())
        for spec, value_of in self._columns:
            family = GaugeMetricFamily(spec.name, spec.text, labels=tuple(spec.labels))
            for labels, reading in readings:
                if (value := value_of(reading)) is not None:
                    family.add_metric(labels, value)
            if family.samples:
                yield family


class Metrics:
    """A service's metrics on its registry, with those of the process itself (`process_*`)."""

    def __init__(self, registry: CollectorRegistry, service: str) -> None:
        # A creation time beside each counter and histogram would double what is scraped.
        disable_created_metrics()
        self.registry = registry
        self.specs: list[MetricSpec] = []
        ProcessCollector(registry=registry)
        labels = {"service": (service,), "version": (octavo.__version__,)}
        info = self._gauge("build_info", "Always 1; the labels say who this is", labels)
        info.labels(service, octavo.__version__).set(1)

    def _note(self, name: str, kind: str, text: str, labels: Labels, unit: str) -> MetricSpec:
        name = f"octavo_{name}"
        last = name.removesuffix("_total").rsplit("_", 1)[1]
        unit = unit or (last if last in _UNITS else "")
        spec = MetricSpec(name, kind, unit, labels, text)
        self.specs.append(spec)
        return spec

    def _counter(
        self, name: str, text: str, labels: Labels = _NO_LABELS, unit: str = ""
    ) -> Counter:
        spec = self._note(name, "counter", text, labels, unit)
        counter = Counter(spec.name, text, tuple(labels), registry=self.registry)
        if labels:
            for values in product(*labels.values()):
                counter.labels(*values)
        return counter

    def _gauge(self, name: str, text: str, labels: Labels = _NO_LABELS, unit: str = "") -> Gauge:
        spec = self._note(name, "gauge", text, labels, unit)
        return Gauge(spec.name, text, tuple(labels), registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float] = LATENCY_BUCKETS_S
    ) -> Histogram:
        spec = self._note(name, "histogram", text, _NO_LABELS, "")
        return Histogram(spec.name, text, buckets=buckets, registry=self.registry)

    def _tally(self, name: str, text: str, buckets: Sequence[float] = LATENCY_BUCKETS_S) -> Tally:
        spec = self._note(name, "histogram", text, _NO_LABELS, "")
        tally = Tally(spec.name, text, buckets)
        self.registry.register(tally)
        return tally

    def _sampled(
        self,
        columns: Mapping[str, tuple[str, Callable[[Any], float | None]]],
        labels: Labels,
        read: Callable[[], Iterable[tuple[Sequence[str], Any]]],
    ) -> None:
        """Gauges sampled at scrape time: name to (text, what it takes from a reading)."""
        noted = [
            (self._note(name, "gauge", text, labels, ""), value_of)
            for name, (text, value_of) in columns.items()
        ]
        self.registry.register(_Sampled(noted, read))

    def _redis_lag(self) -> Gauge:
        return self._gauge("redis_lag_seconds", "Age of the oldest state not in Redis; 0 = none")

    def add_collector(self, collector: Collector) -> None:
        """Values computed at scrape time."""
        self.registry.register(collector)
