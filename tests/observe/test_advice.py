"""Advice for the settings of real loaders: only changes that are possible."""

import asyncio
import hashlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from aioloader import DataLoader, Device
from aioloader._base.records import RecordedSettings
from aioloader._observe.changes import changes
from aioloader._observe.costs import costs_of
from aioloader.datasets import FileDataset, from_iterable
from beside import beside
from observe.clock import Clock, Ticks
from observe.test_verdict import WAITING
from samples import AsyncBatchMap, AsyncMap, AsyncStream, SyncMap, SyncStream


def set_up(loader: DataLoader[Any]) -> RecordedSettings:
    """Return the setting of a loader after an epoch."""
    assert list(loader)
    return replace(loader._live.settings(), cores=8)


def offered(setting: RecordedSettings, ticks: Ticks = WAITING) -> dict[str, str]:
    """Return the arguments that may be changed if batches take ``ticks``, and why."""
    clock = Clock(replace(setting, window=setting.window or 4), [ticks])
    costs = costs_of(clock.run(64), setting)
    assert costs is not None
    return {change.argument: change.why for change in changes(costs, setting)}


def test_only_workers_are_advised_for_tensors_in_memory() -> None:
    """They wait for no store, and none is gathered ahead."""
    loader = DataLoader(TensorDataset(torch.zeros(160, 8)), 4)
    assert {*offered(set_up(loader))} == {"num_workers"}
    costs = costs_of(loader.stats()._records, set_up(loader))
    assert costs is not None
    assert costs.read_cpu == 1


@pytest.mark.parametrize("prefetch_factor", [None, 4])
def test_no_prefetch_is_advised_for_seeded_batches(prefetch_factor: int | None) -> None:
    """Each is made when it is requested, whatever may be requested ahead."""
    loader = DataLoader(SyncMap(8), rng="batch", prefetch_factor=prefetch_factor)
    setting = set_up(loader)
    assert {*offered(setting)} == {"num_workers", "dataset"}
    assert {*offered(replace(setting, place="thread", on_device=1))}.isdisjoint(
        {"prefetch_factor", "Device.ahead"}
    )
    costs = costs_of(Clock(replace(setting, window=4), [WAITING]).run(64), setting)
    assert costs is not None
    settings = {change.argument: change.setting for change in changes(costs, setting)}
    assert settings["dataset"].window == 0


def test_advice_on_workers_says_who_splits_a_stream() -> None:
    """Each worker would yield all samples of a user's stream.

    Other streams split themselves, or the loader alone reads them.
    """
    for ahead in (None, 2):
        reasons = offered(set_up(DataLoader(SyncStream(8), prefetch_factor=ahead)))
        assert {*reasons} == {"prefetch_factor", "num_workers"}
        assert "its own part (get_worker_info())" in reasons["num_workers"]
    for dataset in (from_iterable(range(8)), AsyncStream(8)):
        reasons = offered(set_up(DataLoader(dataset, 4)))
        assert reasons["num_workers"] == "more batches are made at the same time"


async def waiting(value: Any) -> Any:
    """Serve as an async transform or collate function."""
    return value


def test_concurrency_is_advised_for_an_async_transform() -> None:
    """Coroutines transform ``concurrency`` samples at a time."""
    setting = set_up(DataLoader(SyncMap(8), 4, transform=waiting, concurrency=8))
    assert (setting.place, setting.concurrency) == ("loop", 8)
    assert "in the transform" in offered(setting)["concurrency"]
    assert (setting.reading_lanes, setting.transforming_lanes) == (1, 8)
    for dataset in (AsyncStream(8), AsyncBatchMap(8)):
        assert set_up(DataLoader(dataset, 4, transform=waiting)).transforms_async
    # Here the coroutine that reads a sample transforms it, too.
    assert not set_up(DataLoader(AsyncMap(8), 4, transform=waiting)).transforms_async
    # An async collate_fn does not change how many samples coroutines would read.
    reasons = offered(set_up(DataLoader(SyncMap(8), 4, collate_fn=waiting)))
    assert {*reasons} == {"prefetch_factor", "num_workers"}


def test_auto_arguments_are_not_advised() -> None:
    """The setting has their present values, not those at the beginning of an epoch."""
    loader: DataLoader[Any] = DataLoader(AsyncMap(40), 4, concurrency="auto")
    assert "concurrency" not in offered(set_up(loader))
    loader._live.tuning.controllers["concurrency"].value = 100
    assert loader._live.settings().concurrency == loader.stats().stages[1].lanes == 100
    loader.concurrency = 8
    assert set_up(loader).concurrency == 8
    assert "concurrency" in offered(set_up(loader))

    plain: DataLoader[Any] = DataLoader(SyncMap(40), 4, prefetch_factor="auto")
    assert "prefetch_factor" not in offered(set_up(plain))
    plain._live.tuning.controllers["prefetch_factor"].value = 7
    assert plain._live.settings().window == 7


def test_workers_are_not_advised_if_all_runs_on_the_loop() -> None:
    loader: DataLoader[Any] = DataLoader(AsyncStream(8), 4, collate_fn=waiting)
    assert "num_workers" not in offered(set_up(loader))
    assert "num_workers" in offered(set_up(DataLoader(AsyncStream(8), 4)))
    # Threads limit how many files are read, whatever ``concurrency`` is.
    files = DataLoader(FileDataset([os.__file__] * 8), 4)
    assert {*offered(set_up(files))} == {"prefetch_factor", "num_workers"}


def test_device_ahead_is_advised_without_a_device_too() -> None:
    setting = set_up(DataLoader(SyncMap(8), 4, device=Device(transform=tuple)))
    assert setting.stays_on_host
    assert "ready ahead" in offered(setting)["Device.ahead"]
    moved = replace(setting, stays_on_host=False)
    assert "copied ahead" in offered(moved)["Device.ahead"]
    assert not set_up(DataLoader(SyncMap(8), 4, prefetch_factor=2)).stays_on_host


class Pooled:
    """Samples of a client whose pool has two connections."""

    def __len__(self) -> int:
        return 320

    async def __getitem__(self, index: int) -> torch.Tensor:
        async with self.pool:
            await asyncio.sleep(0.01)
        return torch.tensor(index)

    @cached_property
    def pool(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(2)


@pytest.mark.slow
def test_reads_that_queue_in_a_client_get_no_advice() -> None:
    """The report says how many reads the client serves at a time."""
    with DataLoader(Pooled(), batch_size=8) as loader:
        assert len(list(loader)) == 40
        report = loader.report()
    assert (report.stage, report.advice) == ("read", None), str(report)
    served = re.search(r"serve reads about (\d+) at a time", report.limit)
    assert served is not None, str(report)
    assert 1 <= int(served[1]) <= 8


class SlowSampler:
    """Batches of indices that are slow to draw."""

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(40):
            end = time.perf_counter() + 0.02
            while time.perf_counter() < end:  # a sleep would block the loop
                hashlib.sha256(bytes(1 << 18))
            yield [number]

    def __len__(self) -> int:
        return 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (SyncMap(40), {}),
        (SyncMap(40), {"prefetch_factor": 4}),
        (SyncMap(40), {"num_workers": 2}),
        (AsyncMap(40), {"concurrency": 4}),
    ],
)
@pytest.mark.parametrize("way", ["for", "async for"])
async def test_a_slow_sampler_is_named(
    dataset: Any, options: dict[str, Any], way: str, tmp_path: Path
) -> None:
    """In verdict, statistics and trace; the time counts as waiting."""
    loader = DataLoader(dataset, batch_sampler=SlowSampler(), **options)
    async with loader, loader.trace(tmp_path / "trace.json"):
        if way == "for":
            await beside(partial(list, loader))
        else:
            assert len([batch async for batch in loader]) == 40
        report, stats = loader.report(), loader.stats()
    assert report.stage == "sampler", str(report)
    assert "The sampler (SlowSampler) is the bottleneck" in report.headline
    (sampler,) = (stage for stage in stats.stages if stage.name == "sampler")
    assert sampler.busy > 40 * 0.02
    assert stats.waited >= sampler.busy
    assert '"name": "sampler"' in (tmp_path / "trace.json").read_text()
