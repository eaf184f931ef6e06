"""Metrics with the real packages: names, values, loaders that are collected."""

import gc
import sys
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from aioloader import DataLoader, PrometheusCollector, observe_with_opentelemetry
from aioloader._base.records import LoopLag
from observe.showing import Clock, Counting, Figures, Stage


def scraped(registry: CollectorRegistry) -> dict[tuple[Any, ...], float]:
    """Return the metrics of a scrape, read by the package's own parser."""
    text = generate_latest(registry).decode()
    assert text.count("# TYPE") == len(set(text.split("# TYPE ")[1:]))
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def full() -> Counting:
    """Return a loader with figures of every kind."""
    loader = Counting(Clock())
    stage = Stage("read", 2, 9, busy=3.0, starved=1.0, p50=0.1, p95=0.2, p99=0.3)
    loader.figures = Figures(
        *(2, 9, 1.5, 3, 4, 1, 1, 0),
        retries=6,
        batch_bytes=4096.0,
        queued=1.5,
        loop_lag=LoopLag(0.02, 0.125, "read"),
        recent=4,
        samples=20,
        waits=(0.1, 0.2, 0.3),
        stages=(stage,),
    )
    return loader


READ = ("stage", "read")
EXPECTED: dict[tuple[Any, ...], float] = {
    ("aioloader_batches_total",): 9,
    ("aioloader_wait_time_seconds_total",): 1.5,
    ("aioloader_failures_total",): 4,
    ("aioloader_retries_total",): 6,
    ("aioloader_worker_deaths_total",): 1,
    ("aioloader_worker_restarts_total",): 1,
    ("aioloader_epoch",): 2,
    ("aioloader_batches_in_flight",): 3,
    ("aioloader_batch_samples",): 5,
    ("aioloader_batch_size_bytes",): 4096,
    ("aioloader_batches_ready",): 1.5,
    ("aioloader_loop_held_ratio",): 0.125,
    **{
        ("aioloader_wait_duration_seconds", ("quantile", q)): seconds
        for q, seconds in (("0.5", 0.1), ("0.95", 0.2), ("0.99", 0.3))
    },
    **{
        ("aioloader_stage_utilization_ratio", READ, ("state", state)): share
        for state, share in (("busy", 0.75), ("starved", 0.25), ("blocked", 0))
    },
    **{
        ("aioloader_stage_duration_seconds", ("quantile", q), READ): seconds
        for q, seconds in (("0.5", 0.1), ("0.95", 0.2), ("0.99", 0.3))
    },
}


def test_a_scrape_has_all_figures_of_a_named_loader() -> None:
    loader = full()
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(train=loader))
    metrics = scraped(registry)
    assert metrics == {
        (name, ("loader", "train"), *labels): value
        for (name, *labels), value in EXPECTED.items()
    }


def test_opentelemetry_has_the_same_figures() -> None:
    """By its own names and attributes, read at one moment; counters only rise."""
    loader, reader = full(), InMemoryMetricReader()
    provider = MeterProvider([reader])
    observe_with_opentelemetry(provider.get_meter("test"), train=loader)
    metrics = observed(reader)
    names = {name[0] for name in metrics}
    assert len(metrics) == len(EXPECTED)
    assert {"aioloader.batches", "aioloader.wait.time", "aioloader.epoch"} < names
    key = ("aioloader.loader", "train")
    stage = ("aioloader.stage", "read"), ("aioloader.state", "busy")
    assert metrics["aioloader.batches", "{batch}", True, key] == 9
    assert metrics["aioloader.wait.time", "s", True, key] == 1.5
    assert metrics["aioloader.batches.in_flight", "{batch}", False, key] == 3
    assert metrics["aioloader.stage.utilization", "1", False, key, *stage] == 0.75
    assert loader.looks == 1
    loader.figures.batches += 1
    assert observed(reader)["aioloader.batches", "{batch}", True, key] == 10
    assert loader.looks == 2
    del loader
    gc.collect()
    assert observed(reader) == {}
    provider.shutdown()


def observed(reader: InMemoryMetricReader) -> dict[tuple[Any, ...], float]:
    """Return points by name, unit, whether they only rise, and attributes."""
    data = reader.get_metrics_data()
    return {
        (
            metric.name,
            metric.unit,
            getattr(metric.data, "is_monotonic", False),
            *sorted((point.attributes or {}).items()),
        ): point.value  # type: ignore[union-attr]
        for resource in (data.resource_metrics if data else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }


def test_counters_never_fall() -> None:
    """They add up iterations, whenever they are read, also of the same epoch."""
    loader = Counting(Clock())
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(train=loader))
    name = "aioloader_batches_total", ("loader", "train")
    totals = []
    for epoch, readings in ((0, (5, 8)), (1, (2, 10, 10)), (1, (4,)), (3, (6,))):
        loader.figures = Figures(epoch)
        for loader.figures.batches in readings:
            totals.append(scraped(registry)[name])
    assert totals == [5, 8, 10, 18, 18, 22, 28]


def test_a_collector_serves_several_loaders() -> None:
    """Until one is collected; a second collector of the same names is refused."""
    train, test = DataLoader(range(8), 2), DataLoader(range(4), 4)
    registry = CollectorRegistry(auto_describe=True)
    registry.register(PrometheusCollector(train=train, test=test))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(PrometheusCollector(other=train))
    list(train)
    list(test)
    metrics = scraped(registry)
    assert metrics["aioloader_batches_total", ("loader", "train")] == 4
    assert metrics["aioloader_batches_total", ("loader", "test")] == 1
    del test
    gc.collect()
    assert {dict(labels)["loader"] for _, *labels in scraped(registry)} == {"train"}


@pytest.mark.parametrize("package", ["prometheus_client", "opentelemetry.metrics"])
def test_a_missing_package_is_named_with_its_extra(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r'pip install "aioloader\[metrics-'):
        if package == "prometheus_client":
            PrometheusCollector(train=full())
        else:
            observe_with_opentelemetry(None, train=full())  # type: ignore[arg-type]
