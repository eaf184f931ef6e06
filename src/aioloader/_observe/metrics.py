"""A loader's figures for Prometheus and for OpenTelemetry.

Both read ``loader.stats()`` when the metrics are collected, and refer to the loader
weakly. Figures of an epoch are added up over epochs, because counters must never
decrease; batches of an epoch after its last collection are missed.
"""

import importlib
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from prometheus_client.core import Metric


class Figure(NamedTuple):
    """One metric.

    Attributes:
        name: OpenTelemetry's name; Prometheus' name follows from it and the unit.
        unit: OpenTelemetry's unit (UCUM): ``"s"``, ``"1"``, or ``"{batch}"``.
        help: The description.
    """

    name: str
    unit: str
    help: str


# A value of a figure, and its labels as pairs of name and value.
Value: TypeAlias = tuple[float, tuple[tuple[str, str], ...]]


# Of one epoch, to be added up.
_SUMS = (
    Figure("batches", "{batch}", "Batches delivered."),
    Figure(
        "wait.time", "s", "Time the consumer waited for batches that were not ready."
    ),
    Figure("failures", "{sample}", "Samples that failed and were skipped or replaced."),
    Figure("retries", "{read}", "Reads that the loader's retry has repeated."),
)
_COUNTERS = (
    *_SUMS,
    Figure("worker.deaths", "{worker}", "Worker processes that died."),
    Figure(
        "worker.restarts", "{worker}", "Worker processes started to replace others."
    ),
)
_LATEST = "the mean of the latest ones"
FIGURES = (
    *_COUNTERS,
    Figure("epoch", "1", "Number of the latest epoch."),
    Figure("batches.in_flight", "{batch}", "Batches requested and not yet delivered."),
    Figure("batch.samples", "{sample}", f"Samples per batch: {_LATEST}."),
    Figure("batch.size", "By", "Bytes per batch: the mean of some."),
    Figure(
        "batches.ready",
        "{batch}",
        f"Batches that were ready when one was requested: {_LATEST}.",
    ),
    Figure(
        "loop.held",
        "1",
        "Share of the time in which the event loop that reads samples was blocked.",
    ),
    Figure(
        "wait.duration",
        "s",
        "Time from requesting a batch to receiving it: quantiles of the latest ones.",
    ),
    Figure(
        "stage.utilization",
        "1",
        "Share of its time that a stage is busy, starved or blocked.",
    ),
    Figure(
        "stage.duration",
        "s",
        "Time a stage takes for a batch: quantiles of the latest ones.",
    ),
)


def _values(stats: Any) -> dict[str, list[Value]]:
    """Return the values of all figures of ``loader.stats()``."""
    numbers = {
        "batches": stats.batches,
        "wait.time": stats.waited,
        "failures": stats.failures,
        "retries": stats.retries,
        "worker.deaths": stats.worker_deaths,
        "worker.restarts": stats.worker_restarts,
        "epoch": stats.epoch,
        "batches.in_flight": stats.in_flight,
    }
    if stats.recent:
        numbers["batch.samples"] = stats.samples / stats.recent
        numbers["batches.ready"] = stats.queued
    if stats.batch_bytes:
        numbers["batch.size"] = stats.batch_bytes
    if stats.loop_lag is not None:
        numbers["loop.held"] = stats.loop_lag.share
    found: dict[str, list[Value]] = {figure.name: [] for figure in FIGURES}
    found |= {name: [(float(one), ())] for name, one in numbers.items()}
    if stats.recent:
        found["wait.duration"] = _quantiles(stats.waits)
    found["stage.utilization"] = [
        (share, (("stage", stage.name), ("state", state)))
        for stage in stats.stages
        for state, share in stage.shares.items()
    ]
    found["stage.duration"] = [
        one
        for stage in stats.stages
        for one in _quantiles((stage.p50, stage.p95, stage.p99), ("stage", stage.name))
    ]
    return found


def _quantiles(seconds: Iterable[float], *labels: tuple[str, str]) -> list[Value]:
    names = ("0.5", "0.95", "0.99")
    return [
        (one, (*labels, ("quantile", name)))
        for name, one in zip(names, seconds, strict=True)
    ]


class PrometheusCollector:
    """Collect the figures of loaders for ``prometheus_client``.

    Needs ``aioloader[metrics-prometheus]``. The metrics are those of
    ``loader.stats()``, labelled with the loaders' names: ``aioloader_batches_total``,
    ``aioloader_wait_time_seconds_total``, ``aioloader_stage_utilization_ratio``, ...
    Samples per second are ``rate(aioloader_batches_total[1m]) *
    aioloader_batch_samples``.

    Example:
        ``REGISTRY.register(PrometheusCollector(train=loader, validation=other))``

    Args:
        loaders: The loaders, by name; referred to weakly: a deleted one has no values.

    Raises:
        ImportError: If prometheus_client is not installed.
    """

    def __init__(self, **loaders: Any) -> None:
        _require("prometheus_client", "metrics-prometheus")
        self._watched = [_Watched(name, one) for name, one in loaders.items()]

    def describe(self) -> "Iterator[Metric]":
        """Yield the metrics without values, so that a registry knows their names."""
        yield from (_family(figure) for figure in FIGURES)

    def collect(self) -> "Iterator[Metric]":
        """Yield the current metrics."""
        readings = [(one.name, one.read()) for one in self._watched]
        for figure in FIGURES:
            family = _family(figure)
            name = family.name + ("_total" if figure in _COUNTERS else "")
            for loader, reading in readings:
                for value, labels in reading.get(figure.name, ()):
                    family.add_sample(name, {"loader": loader, **dict(labels)}, value)
            yield family


def _family(figure: Figure) -> "Metric":
    from prometheus_client.core import Metric  # noqa: PLC0415  (an extra)

    kind = "counter" if figure in _COUNTERS else "gauge"
    name = "aioloader_" + figure.name.replace(".", "_")
    if figure.unit == "s":
        name += "_seconds"
    elif figure.unit == "By":
        name += "_bytes"
    elif figure.name.endswith(("utilization", "held")):
        name += "_ratio"
    return Metric(name, figure.help, kind)


def observe_with_opentelemetry(meter: "Meter", /, **loaders: Any) -> None:
    """Make observable instruments for the figures of loaders.

    Needs ``aioloader[metrics-opentelemetry]``. The instruments are those of
    ``loader.stats()``: ``aioloader.batches``, ``aioloader.wait.time``,
    ``aioloader.stage.utilization``, ..., with the attribute ``aioloader.loader``.

    Example:
        ``observe_with_opentelemetry(get_meter("training"), train=loader)``

    Args:
        meter: Makes the instruments; call this once per meter.
        loaders: The loaders, by name; referred to weakly: a deleted one is not
            observed.

    Raises:
        ImportError: If opentelemetry-api is not installed.
    """
    _require("opentelemetry.metrics", "metrics-opentelemetry")
    watched = [_Watched(name, one) for name, one in loaders.items()]
    for figure in FIGURES:
        make = (
            meter.create_observable_counter
            if figure in _COUNTERS
            else meter.create_observable_gauge
        )
        make(
            f"aioloader.{figure.name}",
            callbacks=[_observer(figure, watched)],
            unit=figure.unit,
            description=figure.help,
        )


def _observer(
    figure: Figure, watched: "list[_Watched]"
) -> "Callable[[CallbackOptions], Iterable[Observation]]":
    from opentelemetry.metrics import Observation  # noqa: PLC0415  (an extra)

    def observe(_options: "CallbackOptions") -> "Iterator[Observation]":
        for one in watched:
            for value, labels in one.take(figure.name):
                attributes = {f"aioloader.{key}": text for key, text in labels}
                yield Observation(value, {"aioloader.loader": one.name, **attributes})

    return observe


def _require(module: str, extra: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f'metrics need {package}: pip install "aioloader[{extra}]"'
        ) from error


class _Watched:
    """A loader whose figures are collected and added up over epochs."""

    def __init__(self, name: str, loader: Any) -> None:
        self.name = name
        self._loader = weakref.ref(loader)
        self._lock = threading.RLock()  # scrapes may come from several threads
        self._left: dict[str, list[Value]] = {}  # of a collection under way
        self._iteration: object = None  # referred to, so that no other has its id
        self._latest: dict[str, float] = {}  # of the current iteration
        self._before: defaultdict[str, float] = defaultdict(float)  # of earlier ones

    def read(self) -> dict[str, list[Value]]:
        """Return the values of all figures; none if the loader is gone."""
        loader = self._loader()
        if loader is None:
            return {}
        with self._lock:
            stats = loader.stats()
            found = _values(stats)
            if stats.iteration is not self._iteration:
                for name, value in self._latest.items():
                    self._before[name] += value
            self._iteration = stats.iteration
            self._latest = {one.name: found[one.name][0][0] for one in _SUMS}
            for name, value in self._latest.items():
                found[name] = [(self._before[name] + value, ())]
            return found

    def take(self, name: str) -> list[Value]:
        """Return the values of one figure, of the same moment as those of others.

        A collection takes each figure once: the next one begins with a new reading.
        """
        with self._lock:
            if name not in self._left:
                self._left = self.read()
            return self._left.pop(name, [])
