"""The table of defaults, in the guide to workers, says what loaders do.

Its columns are kinds of datasets, here ``KINDS``. A sample says where it is read.
"""

import asyncio
import inspect
import math
import os
import re
import threading
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from aioloader import DataLoader
from aioloader.datasets import TextDataset, from_async_iterable
from aioloader.errors import WorkerStartError

DOCS = Path(__file__).parents[2] / "docs"
PARENT = os.getpid()
SIZE, SAMPLES = 30, 400


class Dataset:
    """Samples that say where they are read; those of a small dataset are indices."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count

    def sample(self, index: int) -> Any:
        return index if self.count < SAMPLES else place()


class Map(Dataset):
    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


class AsyncMap(Map):
    async def __getitem__(self, index: int) -> Any:
        return self.sample(index)


class Together(AsyncMap):
    """Each read waits for 64 concurrent ones; ``most`` is the highest concurrency."""

    now = most = 0

    def __init__(self) -> None:
        super().__init__(192)
        self.barrier = asyncio.Barrier(64)

    async def __getitem__(self, index: int) -> Any:
        self.now += 1
        self.most = max(self.most, self.now)
        await self.barrier.wait()
        self.now -= 1
        return index


class Iterable(Dataset):
    def __iter__(self) -> Iterator[Any]:
        return map(self.sample, range(self.count))


class AsyncIterable(Dataset):
    async def __aiter__(self) -> AsyncIterator[Any]:
        for index in range(self.count):
            yield self.sample(index)


def stream(count: int = SAMPLES) -> Any:
    return from_async_iterable(AsyncIterable(count))


KINDS: tuple[Any, ...] = (Map, AsyncMap, Iterable, AsyncIterable, stream)


class Locked:
    """A transform that cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, sample: Any) -> Any:
        return sample


def place() -> str:
    """Return where this code runs, in the words of the table."""
    is_loop = asyncio._get_running_loop() is not None
    if os.getpid() != PARENT:
        return "a loop in each worker" if is_loop else "each worker"
    is_mine = threading.current_thread() is threading.main_thread()
    owner = "your" if is_mine else "the loader's"
    return f"{owner} {'loop' if is_loop else 'thread'}"


def with_seed(sample: Any) -> tuple[Any, int]:
    """Return a sample, and the seed of torch's generator."""
    return sample, torch.initial_seed()


@cache
def section() -> str:
    """Return the section of the guide."""
    text = (DOCS / "guides" / "workers.md").read_text()
    return text.partition("\n## Defaults\n")[2].partition("\n## ")[0]


@cache
def table() -> dict[str, list[str]]:
    """Return the rows of the table by their names."""
    lines = [line for line in section().splitlines() if line.startswith("| `")]
    rows = [line.strip("| ").split(" | ") for line in lines]
    return {name: cells for name, *cells in rows}


def row(name: str) -> list[str]:
    """Return the only row whose name contains ``name``."""
    (match,) = [cells for key, cells in table().items() if name in key]
    assert len(match) == len(KINDS)
    return match


def first(loader: DataLoader[Any], *, is_async: bool) -> tuple[list[Any], int]:
    """Return the first batch, and how many are then in flight."""

    async def next_batch() -> Any:
        async with loader:
            async for batch in loader:
                in_flight.append(loader.stats().in_flight)
                return batch
        raise AssertionError("no batch")

    in_flight: list[int] = []
    if is_async:
        batch = asyncio.run(next_batch())
    else:
        with loader:
            iterator = iter(loader)
            batch = next(iterator)
            in_flight.append(loader.stats().in_flight)
    return batch, in_flight[0]


def check_in_flight(cell: str, in_flight: int, n: int = 0) -> None:
    """Compare a formula, or its name; with a star, it may be up to a run more."""
    match = re.fullmatch(r"`(.+)`(\*?)", cell)
    assert match
    names = {"n": n, "b": SIZE, "c": 64, "ceil": math.ceil}
    formulas = dict(re.findall(r"(\w) is\s`(ceil[^`]+)`", section()))
    least = eval(formulas.get(match[1], str(match[1])), names)
    run = int(section().rpartition("at most ")[2].partition(":")[0])
    assert least <= in_flight <= least + (run if match[2] else 0)


def test_arguments_have_the_documented_defaults() -> None:
    """Those that the row names give, as attributes of a loader."""
    loader = DataLoader(Map())
    told = re.findall(r"`(\w+)=([^`]+)`:", " ".join(table()))
    assert len(dict(told)) == 8
    for name, value in told:
        default = getattr(loader, name)
        assert value == (f'"{default}"' if isinstance(default, str) else str(default))


def test_the_glossary_names_real_arguments() -> None:
    """The last column of the words in "Ideas"."""
    lines = (DOCS / "ideas.md").read_text().partition("## Words")[2].splitlines()
    cells = [line.split(" | ")[-1] for line in lines if line.startswith("| ")]
    told = set(re.findall(r"`(\w+)`", " ".join(cells)))
    assert told - {*inspect.signature(DataLoader).parameters} == {"interleave"}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("column", range(len(KINDS)))
def test_samples_are_read_where_the_table_says(column: int, *, is_async: bool) -> None:
    """Without workers; as many batches are in flight as it says; no seeds."""
    name = "`async for`" if is_async else "`for`"
    loader = DataLoader(KINDS[column](), SIZE, transform=with_seed, collate_fn=list)
    torch.manual_seed(5)
    batch, in_flight = first(loader, is_async=is_async)
    reads = row(f"{name} reads in")[column]
    assert set(batch) == {(reads, 5)}
    check_in_flight(row(f"in flight, {name}")[column], in_flight)


@pytest.mark.slow
@pytest.mark.parametrize("column", range(len(KINDS)))
def test_workers_read_where_the_table_says(column: int) -> None:
    """Where samples are read, how many batches are in flight, and their seeds."""
    loader = DataLoader(
        KINDS[column](), SIZE, num_workers=2, transform=with_seed, collate_fn=list
    )
    with loader:
        iterator = iter(loader)
        batches = [next(iterator)]
        check_in_flight(row("flight, n workers")[column], loader.stats().in_flight, n=2)
        batches += iterator
    places = {place for batch in batches for place, _ in batch}
    copies = sum(map(len, batches)) // SAMPLES
    reads, *own = row("n workers, reads in")[column].split(", its own copy")
    assert (places, copies) == ({reads}, 2 if own else 1)
    seeds = [{seed for _, seed in batch} for batch in batches]
    assert row("rng=None")[column] == "per batch"
    assert len(set().union(*seeds)) == sum(map(len, seeds)) == len(batches)


@pytest.mark.slow
@pytest.mark.parametrize("column", range(len(KINDS)))
def test_worker_processes_start_as_the_table_says(column: int) -> None:
    """Only forked workers can use something that cannot be pickled."""
    loader = DataLoader(KINDS[column](4), num_workers=1, transform=Locked())
    try:
        list(loader)
        start = "fork"
    except WorkerStartError:
        start = "fork server"
    assert row("start by")[column] == start


@pytest.mark.parametrize("column", range(len(KINDS)))
def test_the_callers_loop_is_used_where_the_table_says(column: int) -> None:
    """It replaces the loader's loop, if the dataset needs one."""
    loader = DataLoader(KINDS[column](), SIZE, collate_fn=list, loop="caller")
    batch, _ = first(loader, is_async=True)
    used = {"your loop": "your loop", "the loader's thread": "no loop"}
    assert {used[place] for place in batch} == {row('loop="thread"')[column]}


@pytest.mark.parametrize("column", range(len(KINDS)))
def test_tails_and_auto_workers_are_as_in_the_table(column: int) -> None:
    """What ranks do with the last batch; the first number of workers, or none."""
    cell, auto = row("tail=None")[column], row("at first")[column]
    given: dict[str, Any] = {"collate_fn": list, "rank": 1, "world_size": 2}
    loader = DataLoader(KINDS[column](5), **given)
    if "none if" in cell:
        with pytest.raises(ValueError, match="tail"):
            iter(loader)
    else:
        wrapped = DataLoader(KINDS[column](5), tail="wrap", **given)
        assert cell == '`"wrap"`'
        assert list(loader) == list(wrapped)
        assert len(list(loader)) == 3
    if auto == "an error":
        with pytest.raises(ValueError, match="num_workers='auto'"):
            DataLoader(KINDS[column](), num_workers="auto")
    else:
        many = DataLoader(KINDS[column](), num_workers="auto").num_workers
        assert (many == 0) == (auto == "0")
        assert many <= 8


def test_concurrency_is_as_in_the_table(tmp_path: Path) -> None:
    """Coroutines read ``concurrency`` samples at once; other samples are read singly.

    A stream reads one shard: that is ``interleave=1``, one slot.
    """
    samples, cells = Together(), row("concurrency=64")
    assert sum(map(len, DataLoader(samples, SIZE, collate_fn=list))) == 192
    assert (cells[1], samples.most) == ("`c`", 64)
    assert cells[:1] + cells[2:4] == ["`1`"] * 3
    for name in "ab":
        (tmp_path / name).write_text(f"{name}1\n{name}2\n")
    slots = int(cells[-1].removeprefix("`interleave=")[0])
    lines = list(DataLoader(TextDataset(str(tmp_path / "*")), batch_size=None))
    given = TextDataset(str(tmp_path / "*"), interleave=slots)
    assert lines == list(DataLoader(given, batch_size=None)) == ["a1", "a2", "b1", "b2"]
