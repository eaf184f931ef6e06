"""A loader's figures for Prometheus and for OpenTelemetry.

Both read ``loader.stats()`` when the metrics are collected, and refer to the loader
weakly. Figures of an epoch are added up over epochs, because counters must never
decrease; batches of an epoch after its last collection are missed.
"""

import importlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from prometheus_client.core import Metric


@dataclass(frozen=True)
class Figure:
    """One metric.

    Attributes:
        name: OpenTelemetry's name; Prometheus' name follows from it and the unit.
        unit: OpenTelemetry's unit (UCUM): ``"s"``, ``"1"``, or ``"{batch}"``.
        kind: ``"sum"``: per epoch, to be added up; ``"total"``: over all epochs
            already; ``"gauge"``: a present value.
        help: The description.
        of: Returns values and labels from ``loader.stats()``.
    """

    name: str
    unit: str
    kind: Literal["sum", "total", "gauge"]
    help: str
    of: Callable[[Any], Iterable["Value"]]


class Value(NamedTuple):
    """One value of a figure, and its labels as pairs of name and value."""

    value: float
    labels: tuple[tuple[str, str], ...] = ()


def _one(name: str) -> Callable[[Any], Iterable[Value]]:
    return lambda stats: [Value(float(getattr(stats, name)))]


def _batch_size(stats: Any) -> Iterator[Value]:
    if stats.recent:
        yield Value(stats.samples / stats.recent)


def _batch_bytes(stats: Any) -> Iterator[Value]:
    if stats.batch_bytes:
        yield Value(stats.batch_bytes)


def _ready(stats: Any) -> Iterator[Value]:
    if stats.recent:
        yield Value(stats.queued)


def _loop_held(stats: Any) -> Iterator[Value]:
    if stats.loop_lag is not None:
        yield Value(stats.loop_lag.share)


def _waits(stats: Any) -> Iterator[Value]:
    if stats.recent:
        for quantile, seconds in zip(("0.5", "0.95", "0.99"), stats.waits, strict=True):
            yield Value(seconds, (("quantile", quantile),))


def _stage_shares(stats: Any) -> Iterator[Value]:
    for stage in stats.stages:
        seconds = stage.busy + stage.starved + stage.blocked
        for state in ("busy", "starved", "blocked"):
            share = getattr(stage, state) / seconds if seconds else 0.0
            yield Value(share, (("stage", stage.name), ("state", state)))


def _stage_durations(stats: Any) -> Iterator[Value]:
    for stage in stats.stages:
        for name, quantile in (("p50", "0.5"), ("p95", "0.95"), ("p99", "0.99")):
            labels = ("stage", stage.name), ("quantile", quantile)
            yield Value(getattr(stage, name), labels)


FIGURES = (
    Figure("batches", "{batch}", "sum", "Batches delivered.", _one("batches")),
    Figure(
        "wait.time",
        "s",
        "sum",
        "Time the consumer waited for batches that were not ready.",
        _one("waited"),
    ),
    Figure(
        "failures",
        "{sample}",
        "sum",
        "Samples that failed and were skipped or replaced.",
        _one("failures"),
    ),
    Figure(
        "retries",
        "{read}",
        "sum",
        "Reads that the loader's retry has repeated.",
        _one("retries"),
    ),
    Figure(
        "worker.deaths",
        "{worker}",
        "total",
        "Worker processes that died.",
        _one("worker_deaths"),
    ),
    Figure(
        "worker.restarts",
        "{worker}",
        "total",
        "Worker processes started to replace others.",
        _one("worker_restarts"),
    ),
    Figure("epoch", "1", "gauge", "Number of the latest epoch.", _one("epoch")),
    Figure(
        "batches.in_flight",
        "{batch}",
        "gauge",
        "Batches requested and not yet delivered.",
        _one("in_flight"),
    ),
    Figure(
        "batch.samples",
        "{sample}",
        "gauge",
        "Samples per batch: the mean of the latest ones.",
        _batch_size,
    ),
    Figure(
        "batch.size",
        "By",
        "gauge",
        "Bytes per batch: the mean of some.",
        _batch_bytes,
    ),
    Figure(
        "batches.ready",
        "{batch}",
        "gauge",
        "Batches that were ready when one was requested: the mean of the latest ones.",
        _ready,
    ),
    Figure(
        "loop.held",
        "1",
        "gauge",
        "Share of the time in which the event loop that reads samples was blocked.",
        _loop_held,
    ),
    Figure(
        "wait.duration",
        "s",
        "gauge",
        "Time from requesting a batch to receiving it: quantiles of the latest ones.",
        _waits,
    ),
    Figure(
        "stage.utilization",
        "1",
        "gauge",
        "Share of its time that a stage is busy, starved or blocked.",
        _stage_shares,
    ),
    Figure(
        "stage.duration",
        "s",
        "gauge",
        "Time a stage takes for a batch: quantiles of the latest ones.",
        _stage_durations,
    ),
)


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
            name = family.name + ("_total" if figure.kind != "gauge" else "")
            for loader, reading in readings:
                for value, labels in reading.get(figure.name, ()):
                    family.add_sample(name, {"loader": loader, **dict(labels)}, value)
            yield family


def _family(figure: Figure) -> "Metric":
    from prometheus_client.core import Metric  # noqa: PLC0415  (an extra)

    kind = "gauge" if figure.kind == "gauge" else "counter"
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
            meter.create_observable_gauge
            if figure.kind == "gauge"
            else meter.create_observable_counter
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
        self._latest: dict[Any, float] = {}  # of the current iteration
        self._before: dict[Any, float] = {}  # of earlier iterations

    def read(self) -> dict[str, list[Value]]:
        """Return the values of all figures; none if the loader is gone."""
        loader = self._loader()
        if loader is None:
            return {}
        with self._lock:
            stats = loader.stats()
            found = {figure.name: list(figure.of(stats)) for figure in FIGURES}
            sums = {
                (figure.name, one.labels): one.value
                for figure in FIGURES
                if figure.kind == "sum"
                for one in found[figure.name]
            }
            self._settle(stats.iteration, sums)
            for figure in FIGURES:
                if figure.kind == "sum":
                    found[figure.name] = [
                        Value(self._total(figure.name, labels), labels)
                        for name, labels in {**self._before, **sums}
                        if name == figure.name
                    ]
            return found

    def take(self, name: str) -> list[Value]:
        """Return the values of one figure, of the same moment as those of others.

        A collection takes each figure once: the next one begins with a new reading.
        """
        with self._lock:
            if name not in self._left:
                self._left = self.read()
            return self._left.pop(name, [])

    def _settle(self, iteration: object, sums: dict[Any, float]) -> None:
        """Add the figures of the previous iteration if a new one has started."""
        if iteration is not self._iteration:
            for key, value in self._latest.items():
                self._before[key] = self._before.get(key, 0.0) + value
        self._iteration, self._latest = iteration, sums

    def _total(self, name: str, labels: Any) -> float:
        key = name, labels
        return self._before.get(key, 0.0) + self._latest.get(key, 0.0)
