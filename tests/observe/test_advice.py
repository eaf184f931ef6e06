"""What the verdict may advise, in the settings of real loaders: nothing impossible."""

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
    """Return how a loader is set up, after an epoch."""
    assert list(loader)
    return replace(loader._live.settings(), cores=8)


def offered(setting: RecordedSettings, ticks: Ticks = WAITING) -> dict[str, str]:
    """Return the arguments whose change is tried if batches take that long, and why."""
    clock = Clock(replace(setting, window=setting.window or 4), [ticks])
    costs = costs_of(clock.run(64), setting)
    assert costs is not None
    return {one.argument: one.why for one in changes(costs, setting)}


def test_tensors_in_memory() -> None:
    """They wait for no store, and none is gathered ahead."""
    loader = DataLoader(TensorDataset(torch.zeros(160, 8)), 4)
    assert {*offered(set_up(loader))} == {"num_workers"}
    costs = costs_of(loader.stats()._records, set_up(loader))
    assert costs is not None
    assert costs.read_cpu == 1


@pytest.mark.parametrize("prefetch_factor", [None, 4])
def test_batches_that_draw_from_a_generator(prefetch_factor: int | None) -> None:
    """Each is made when it is requested, whatever is asked for ahead."""
    loader = DataLoader(SyncMap(8), rng="batch", prefetch_factor=prefetch_factor)
    setting = set_up(loader)
    assert {*offered(setting)} == {"num_workers", "dataset"}
    assert {*offered(replace(setting, place="thread", on_device=1))}.isdisjoint(
        {"prefetch_factor", "Device.ahead"}
    )
    costs = costs_of(Clock(replace(setting, window=4), [WAITING]).run(64), setting)
    assert costs is not None
    found = {one.argument: one.setting for one in changes(costs, setting)}
    assert found["dataset"].window == 0


def test_streams() -> None:
    """The user's has no ``__getitem__``, and each worker would yield all its samples.

    Others split themselves, or the loader reads them alone.
    """
    for ahead in (None, 2):
        found = offered(set_up(DataLoader(SyncStream(8), prefetch_factor=ahead)))
        assert {*found} == {"prefetch_factor", "num_workers"}
        assert "its own part (get_worker_info())" in found["num_workers"]
    for dataset in (from_iterable(range(8)), AsyncStream(8)):
        found = offered(set_up(DataLoader(dataset, 4)))
        assert found["num_workers"] == "more batches are made at the same time"


async def waiting(found: Any) -> Any:
    """Transform, or collate."""
    return found


def test_plain_reads_before_an_async_transform() -> None:
    """Coroutines transform as many samples at a time as ``concurrency`` says."""
    setting = set_up(DataLoader(SyncMap(8), 4, transform=waiting, concurrency=8))
    assert (setting.place, setting.concurrency) == ("loop", 8)
    assert "in the transform" in offered(setting)["concurrency"]
    assert (setting.reading_lanes, setting.transforming_lanes) == (1, 8)
    for dataset in (AsyncStream(8), AsyncBatchMap(8)):
        assert set_up(DataLoader(dataset, 4, transform=waiting)).transforms_async
    # There each sample is transformed by the coroutine that has read it.
    assert not set_up(DataLoader(AsyncMap(8), 4, transform=waiting)).transforms_async
    # An async collate_fn changes nothing of how many samples coroutines would read.
    found = offered(set_up(DataLoader(SyncMap(8), 4, collate_fn=waiting)))
    assert {*found} == {"prefetch_factor", "num_workers"}


def test_what_the_loader_chooses() -> None:
    """It is not advised; what is chosen now counts, not what an epoch began with."""
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


def test_workers_that_cannot_help() -> None:
    """All of it runs on the loop."""
    loader: DataLoader[Any] = DataLoader(AsyncStream(8), 4, collate_fn=waiting)
    assert "num_workers" not in offered(set_up(loader))
    assert "num_workers" in offered(set_up(DataLoader(AsyncStream(8), 4)))
    # Threads limit how many files are read, whatever ``concurrency`` is.
    files = DataLoader(FileDataset([os.__file__] * 8), 4)
    assert {*offered(set_up(files))} == {"prefetch_factor", "num_workers"}


def test_a_transform_without_a_device() -> None:
    setting = set_up(DataLoader(SyncMap(8), 4, device=Device(transform=tuple)))
    assert setting.stays_on_host
    assert "ready ahead" in offered(setting)["Device.ahead"]
    moved = replace(setting, stays_on_host=False)
    assert "copied ahead" in offered(moved)["Device.ahead"]
    assert not set_up(DataLoader(SyncMap(8), 4, prefetch_factor=2)).stays_on_host


class Pooled:
    """Samples from a client that has a pool of two connections."""

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
def test_reads_that_queue_in_their_client() -> None:
    """No more of them are advised, but a larger pool."""
    with DataLoader(Pooled(), batch_size=8) as loader:
        assert len(list(loader)) == 40
        found = loader.report()
    assert (found.stage, found.advice) == ("read", None), str(found)
    served = re.search(r"serve reads about (\d+) at a time", found.limit)
    assert served is not None, str(found)
    assert 1 <= int(served[1]) <= 8


class SlowSampler:
    """Batches of indices that take long to draw."""

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
    """In the verdict, the statistics and the trace; and training waits for it."""
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
