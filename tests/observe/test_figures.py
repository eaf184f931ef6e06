"""Bytes, retries, listings and queues in ``stats()``, wherever batches are made."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from aioloader import DataLoader, Retry
from aioloader._base.records import BatchRecord
from aioloader._observe.stats import LoaderStats
from aioloader.datasets import JSONLinesDataset
from samples import AsyncMap, SyncMap, SyncStream

BATCH = 4
PLACES: dict[str, dict[str, Any]] = {
    "here": {},
    "ahead": {"prefetch_factor": 2},
    "threads": {"num_workers": 2, "workers": "thread"},
    "processes": {"num_workers": 2},
}


class Flaky(Dataset[int]):
    """The first read of each fifth sample fails."""

    def __init__(self) -> None:
        self.failed: set[int] = set()

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index % 5 == 0 and index not in self.failed:
            self.failed.add(index)
            raise OSError(f"sample {index} is busy")
        return index


class AsyncFlaky(Flaky):
    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().__getitem__(index)


class FlakyBatches(Flaky):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class Noting(SyncMap):
    """Notes the times at which its samples are read."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.times: list[float] = []

    def __getitem__(self, index: int) -> Any:
        self.times.append(perf_counter())
        return super().__getitem__(index)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["plain", "transform", "async", "in memory"])
def test_stats_have_the_mean_bytes_of_a_batch(place: str, kind: str) -> None:
    """All batches are alike here."""
    rows = torch.zeros(40, 8)
    datasets: dict[str, Any] = {
        "plain": SyncMap(40),
        "transform": SyncMap(40),
        "async": AsyncMap(40),
        "in memory": TensorDataset(rows),
    }
    options: dict[str, Any] = {"batch_size": BATCH, **PLACES[place]}
    if kind == "transform":
        options["transform"] = tuple
    with DataLoader(datasets[kind], **options) as loader:
        assert loader.stats().batch_bytes == 0
        assert sum(1 for _ in loader) == 10
        stats = loader.stats()
    # Three floats and an integer per sample; or eight floats.
    assert stats.batch_bytes == BATCH * (32 if kind == "in memory" else 3 * 4 + 8)
    assert "MB/s" in str(stats)


@pytest.mark.slow
@pytest.mark.parametrize("place", [*PLACES, "executor"])
@pytest.mark.parametrize("kind", [Flaky, AsyncFlaky, FlakyBatches])
def test_stats_count_retries_wherever_batches_are_made(kind: Any, place: str) -> None:
    retry = Retry(4, base_delay=0)
    with ThreadPoolExecutor(1) as pool:
        options = PLACES.get(place, {"num_workers": 1, "workers": pool})
        with DataLoader(kind(), BATCH, retry=retry, **options) as loader:
            batches = [batch.tolist() for batch in loader]
            stats = loader.stats()
    assert [sample for batch in batches for sample in batch] == list(range(20))
    assert (stats.retries, stats.failures) == (4, 0)
    assert "retries: 4" in str(stats)


def test_stats_have_the_number_of_listed_shards(tmp_path: Path) -> None:
    """For streams only."""
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_text('{"x": 1}\n' * 4)
    with DataLoader(JSONLinesDataset(str(tmp_path / "*.jsonl")), 4) as loader:
        for _ in range(2):
            assert sum(1 for _ in loader) == 3
            stats = loader.stats()
            assert stats.listed is not None
            assert stats.listed.shards == 3
            assert stats.listed.seconds > 0
            assert "listed 3 shards" in str(stats)
    with DataLoader(AsyncMap(8), 4) as loader:
        assert sum(1 for _ in loader) == 2
        assert "listed" not in str(loader.stats())


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Noting(20), BATCH),
        DataLoader(Noting(20), BATCH, rng="batch"),
        DataLoader(Noting(20), BATCH, transform=tuple),
        DataLoader(SyncStream(20), BATCH),
        DataLoader(TensorDataset(torch.zeros(20)), BATCH),
    ],
    ids=["plain", "drawing", "transform", "stream", "in memory"],
)
def test_a_plain_for_waits_while_it_makes_a_batch(loader: DataLoader[Any]) -> None:
    for number, _ in enumerate(loader, start=1):
        stats = loader.stats()
        waits = [record.taken - record.asked for record in stats._records]
        assert len(waits) == number
        assert stats.waited == pytest.approx(sum(waits))
        if isinstance(loader.dataset, Noting):
            latest, times = stats._records[-1], loader.dataset.times
            assert latest.asked <= times[-BATCH] <= times[-1] <= latest.taken
    assert stats.waited > 0


def test_stats_have_the_mean_number_of_ready_batches() -> None:
    """Four batches are made at once, then requested one after another."""

    def record(number: int, asked: float, collated: float) -> BatchRecord:
        made = (0.0, 1.0, 1.0, 1.0, collated, 0.0, 0.0, 0.0)
        return BatchRecord(number, asked, max(asked, collated), 0, 1, made)

    empty = LoaderStats(0, 4, 0.0, 0, failures=0)
    assert empty.queued == 0
    ahead = [record(number, 10.0 + number, 2.0) for number in range(4)]
    assert replace(empty, _records=ahead).queued == (4 + 3 + 2 + 1) / 4
    late = [record(number, 10.0 * number, 10.0 * number + 5) for number in range(4)]
    assert replace(empty, _records=late).queued == 0
