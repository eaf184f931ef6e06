"""A loader's metrics for Prometheus and for OpenTelemetry.

Both exporters call ``loader.stats()`` at each collection and refer to loaders weakly.
An epoch's counts are added to those of earlier epochs, because counters must never
decrease. Batches between the last collection of an epoch and its end are not counted.
"""

import threading
import weakref
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from aioloader._base.extras import imported

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from prometheus_client.core import Metric

# By metric name: the metric's values, each with its labels.
MetricValues: TypeAlias = dict[str, list[tuple[float, dict[str, str]]]]


_LATEST = "the mean of the latest ones"
_QUANTILES = "quantiles of the latest ones"
# Each metric's unit (in UCUM, as OpenTelemetry requires) and its description.
_METRICS = {
    "batches": ("{batch}", "Batches delivered."),
    "wait.time": ("s", "Time the consumer waited for batches that were not ready."),
    "failures": ("{sample}", "Samples that failed and were skipped or replaced."),
    "retries": ("{read}", "Reads that the loader's retry has repeated."),
    "worker.deaths": ("{worker}", "Worker processes that died."),
    "worker.restarts": ("{worker}", "Worker processes started to replace others."),
    "epoch": ("{epoch}", "Number of the latest epoch."),
    "batches.in_flight": ("{batch}", "Batches requested and not yet delivered."),
    "batch.samples": ("{sample}", f"Samples per batch: {_LATEST}."),
    "batch.size": ("By", "Bytes per batch: the mean of some."),
    "batches.ready": (
        "{batch}",
        f"Batches that were ready when one was requested: {_LATEST}.",
    ),
    "loop.held": (
        "1",
        "Share of the time in which the event loop that reads samples was blocked.",
    ),
    "wait.duration": (
        "s",
        f"Time from requesting a batch to receiving it: {_QUANTILES}.",
    ),
    "stage.utilization": (
        "1",
        "Share of its time that a stage is busy, starved or blocked.",
    ),
    "stage.duration": ("s", f"Time a stage takes for a batch: {_QUANTILES}."),
}
# Counts of one epoch, which are added up over epochs. Then all counters.
_SUMS = ("batches", "wait.time", "failures", "retries")
_COUNTERS = (*_SUMS, "worker.deaths", "worker.restarts")
# Suffixes of Prometheus' names, by unit.
_ENDINGS = {"s": "_seconds", "1": "_ratio", "By": "_bytes"}


def _values(stats: Any) -> MetricValues:
    """Convert ``loader.stats()`` to metric values; leave out metrics without values."""
    numbers: dict[str, Any] = {
        "batches": stats.batches,
        "wait.time": stats.waited,
        "failures": stats.failures,
        "retries": stats.retries,
        "worker.deaths": stats.worker_deaths,
        "worker.restarts": stats.worker_restarts,
        "epoch": stats.epoch,
        "batches.in_flight": stats.in_flight,
        "batch.size": stats.batch_bytes or None,
        "loop.held": stats.loop_lag and stats.loop_lag.share,
    }
    quantiles = [
        ("stage.duration", (stage.p50, stage.p95, stage.p99), {"stage": stage.name})
        for stage in stats.stages
    ]
    if stats.recent:
        numbers["batch.samples"] = stats.samples / stats.recent
        numbers["batches.ready"] = stats.queued
        quantiles.append(("wait.duration", stats.waits, {}))
    values: MetricValues = defaultdict(list)
    for name, value in numbers.items():
        if value is not None:
            values[name].append((float(value), {}))
    for stage in stats.stages:
        for state, share in stage.shares.items():
            labels = {"stage": stage.name, "state": state}
            values["stage.utilization"].append((share, labels))
    for name, seconds, labels in quantiles:
        for quantile, value in zip(("0.5", "0.95", "0.99"), seconds, strict=True):
            values[name].append((value, labels | {"quantile": quantile}))
    return values


class PrometheusCollector:
    """A ``prometheus_client`` collector of loaders' metrics.

    Needs ``aioloader[metrics-prometheus]``. The metrics are those of
    ``loader.stats()``, labelled with the loaders' names: ``aioloader_batches_total``,
    ``aioloader_wait_time_seconds_total``, ``aioloader_stage_utilization_ratio``, ...
    Samples per second are ``rate(aioloader_batches_total[1m]) *
    aioloader_batch_samples``.

    Example:
        ``REGISTRY.register(PrometheusCollector(train=loader, validation=other))``

    Args:
        loaders: The loaders, by name. A loader that is deleted has no more values.

    Raises:
        ImportError: If prometheus_client is not installed.
    """

    def __init__(self, **loaders: Any) -> None:
        why = "metrics need prometheus_client"
        imported("prometheus_client", "metrics-prometheus", why)
        self._watched = [_Watched(name, loader) for name, loader in loaders.items()]

    def describe(self) -> "Iterator[Metric]":
        """Yield the metrics without values, so that a registry knows their names."""
        yield from map(_family, _METRICS)

    def collect(self) -> "Iterator[Metric]":
        """Yield all metrics with their current values."""
        for figure in _METRICS:
            family = _family(figure)
            name = family.name + ("_total" if figure in _COUNTERS else "")
            for loader in self._watched:
                for value, labels in loader.take(figure):
                    family.add_sample(name, {"loader": loader.name, **labels}, value)
            yield family


def _family(figure: str) -> "Metric":
    from prometheus_client.core import Metric  # noqa: PLC0415  (an extra)

    kind = "counter" if figure in _COUNTERS else "gauge"
    unit, words = _METRICS[figure]
    name = f"aioloader_{figure.replace('.', '_')}{_ENDINGS.get(unit, '')}"
    return Metric(name, words, kind)


def observe_with_opentelemetry(meter: "Meter", /, **loaders: Any) -> None:
    """Create observable instruments of loaders' metrics.

    Needs ``aioloader[metrics-opentelemetry]``. The instruments are those of
    ``loader.stats()``: ``aioloader.batches``, ``aioloader.wait.time``,
    ``aioloader.stage.utilization``, ..., with the attribute ``aioloader.loader``.

    Example:
        ``observe_with_opentelemetry(get_meter("training"), train=loader)``

    Args:
        meter: Creates the instruments. Call this function once per meter.
        loaders: The loaders, by name. A deleted loader is no longer observed.

    Raises:
        ImportError: If opentelemetry-api is not installed.
    """
    why = "metrics need opentelemetry"
    imported("opentelemetry.metrics", "metrics-opentelemetry", why)
    watched = [_Watched(name, loader) for name, loader in loaders.items()]
    for figure, (unit, words) in _METRICS.items():
        kind = "counter" if figure in _COUNTERS else "gauge"
        make = getattr(meter, f"create_observable_{kind}")
        callbacks = [partial(_observe, watched, figure)]
        make(f"aioloader.{figure}", callbacks, unit, words)


def _observe(
    watched: "list[_Watched]", name: str, _options: "CallbackOptions"
) -> "Iterator[Observation]":
    from opentelemetry.metrics import Observation  # noqa: PLC0415  (an extra)

    for loader in watched:
        for value, labels in loader.take(name):
            labelled = {"loader": loader.name, **labels}.items()
            yield Observation(value, {f"aioloader.{key}": of for key, of in labelled})


class _Watched:
    """A weakly held loader and its metrics, with counts added up over epochs."""

    def __init__(self, name: str, loader: Any) -> None:
        self.name = name
        self._loader = weakref.ref(loader)
        self._lock = threading.RLock()  # scrapes may come from several threads
        self._left: MetricValues = {}  # not yet taken in this collection
        self._iteration: object = None  # the iteration that ``_latest`` counts
        self._latest: dict[str, float] = {}  # counts of the current iteration
        self._before: defaultdict[str, float] = defaultdict(float)  # earlier counts

    def read(self) -> MetricValues:
        """Return the values of all metrics; empty if the loader was deleted."""
        loader = self._loader()
        if loader is None:
            return {}
        with self._lock:
            stats = loader.stats()
            if stats.iteration is not self._iteration:
                for name, value in self._latest.items():
                    self._before[name] += value
            self._iteration, values = stats.iteration, _values(stats)
            self._latest = {name: values[name][0][0] for name in _SUMS}
            sums = self._latest.items()
            return values | {name: [(self._before[name] + of, {})] for name, of in sums}

    def take(self, name: str) -> list[tuple[float, dict[str, str]]]:
        """Return the values of one metric; all metrics are read at the same time.

        Taking a metric a second time starts the next collection, with a new reading.
        """
        with self._lock:
            if name not in self._left:
                self._left = {metric: [] for metric in _METRICS} | self.read()
            return self._left.pop(name)
