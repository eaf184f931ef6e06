"""A map-style dataset as a stream: shuffled as a whole, shared, resumed anywhere."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from aioloader import DataLoader, ShuffledIndices
from aioloader._order.blocks import Bad
from aioloader.datasets import from_dataset
from aioloader.protocols import HasLifespan
from datasets.shards import check_resumes, items, read
from datasets.test_rank_ends import masked

N = 23


class Plain:
    """Squares; one of them fails."""

    def __init__(self, length: int = N, bad: int = -1) -> None:
        self.length, self.bad = length, bad
        self.threads = set[threading.Thread]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.threads.add(threading.current_thread())
        if index == self.bad or not 0 <= index < self.length:
            raise IndexError(f"no {index}")
        return index**2


class Together(Plain):
    """Reads several at once; all fail if one does."""

    calls = 0

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls += 1
        return [super(Together, self).__getitem__(index) for index in indices]


class Coroutines(Plain):
    """Reads many at a time."""

    under_way = most = 0

    async def __getitem__(self, index: int) -> Any:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for _ in range(1 + index % 3):
            await asyncio.sleep(0)
        self.under_way -= 1
        return super().__getitem__(index)


class CoroutinesTogether(Coroutines):
    """Reads several in one call."""

    calls = 0

    async def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls += 1
        await asyncio.sleep(0)
        return [super(Coroutines, self).__getitem__(index) for index in indices]


class Wrapped(Plain):
    """A plain dataset that returns what a coroutine function returns."""

    def __getitem__(self, index: int) -> Any:
        return Coroutines(self.length, self.bad)[index]


KINDS: list[type[Plain]] = [Plain, Together, Coroutines, CoroutinesTogether, Wrapped]
KIND = pytest.mark.parametrize("kind", KINDS)


@KIND
@pytest.mark.parametrize("shuffle", [False, True])
async def test_all_samples_in_each_epoch(kind: type[Plain], shuffle: bool) -> None:
    stream = from_dataset(kind(), shuffle=shuffle, seed=4)
    squares = [index**2 for index in range(N)]
    epochs = [await items(stream) for _ in range(3)]
    assert [sorted(one) for one in epochs] == [squares] * 3
    assert len({*map(tuple, epochs)}) == (3 if shuffle else 1)
    assert (epochs[0] == squares) == (not shuffle)
    again = from_dataset(kind(), shuffle=shuffle, seed=4)
    again.set_epoch(2)
    assert await items(again) == epochs[2]


@KIND
async def test_a_failed_sample_fails_alone(kind: type[Plain]) -> None:
    async with aiter(from_dataset(kind(bad=5))) as iterator:
        block: Any = await iterator.pull(N)
        while len(block) < N:
            block += await iterator.pull(N)
    assert [one for one in block if type(one) is not Bad] == [
        index**2 for index in range(N) if index != 5
    ]
    assert str(block[5].error) == "no 5"
    assert (
        block[5].error.__notes__
        == [
            f"aioloader: sample 5 of {kind.__name__}",
            "aioloader: in 'from_dataset' of the stream",
        ][kind is Wrapped :]
    )


@pytest.mark.slow
@KIND
async def test_resumes_anywhere(kind: type[Plain]) -> None:
    stream = from_dataset(kind(), shuffle=True)
    stream.set_epoch(0)
    whole = await items(stream)
    await check_resumes(stream, whole, range(N + 1))
    _, state = await read(stream, 9)
    assert state["streams"]["0"]["state"] == {"up": {"at": 9}}


# -- where it is read -----------------------------------------------------------------


async def test_a_plain_one_is_read_in_one_thread() -> None:
    """Of all readers, and not on the loop."""
    dataset = Plain(200)
    stream = from_dataset(dataset).readers(4).shard(0, 1)
    assert sorted(await items(stream)) == [index**2 for index in range(200)]
    assert len(dataset.threads) == 1
    assert threading.current_thread() not in dataset.threads
    assert not any(one.is_alive() for one in dataset.threads)


@pytest.mark.parametrize(("readers", "least"), [(1, 6), (3, 2)])
async def test_coroutines_run_many_at_a_time(readers: int, least: int) -> None:
    dataset = Coroutines(60)
    await items(from_dataset(dataset, concurrency=6).readers(readers))
    assert least <= dataset.most <= 6


async def test_several_are_read_together() -> None:
    dataset = Together(500)
    async with aiter(from_dataset(dataset)) as iterator:
        blocks = [await iterator.pull(100) for _ in range(5)]
    assert [len(block) for block in blocks] == [100] * 5
    assert dataset.calls == 5


ASYNC: Any = Coroutines
WRAPPERS: dict[str, Callable[[], Any]] = {
    "subset": lambda: Subset(ASYNC(), range(N)),
    "concat": lambda: ConcatDataset([ASYNC(7), ASYNC(N)]),
    "stack": lambda: StackDataset(ASYNC(), ASYNC()),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
async def test_wrappers_of_torch(wrapper: str) -> None:
    found = await items(from_dataset(WRAPPERS[wrapper]()))
    squares = [index**2 for index in range(N)]
    wanted: Any = {"concat": [*squares[:7], *squares]}
    wanted["stack"] = [(one, one) for one in squares]
    assert found == wanted.get(wrapper, squares)


async def test_its_resources_are_entered_on_the_loop() -> None:
    entered: list[str] = []

    class Owned(Coroutines, HasLifespan):
        @contextlib.asynccontextmanager
        async def lifespan(self) -> AsyncIterator[None]:
            entered.append("entered")
            yield
            entered.append("left")

    stream = from_dataset(Owned()).readers(2)
    assert len(await items(stream.repeat(2))) == 2 * N
    assert entered == ["entered", "left"]


# -- among ranks ----------------------------------------------------------------------


def read_all(make: Callable[[], Any], ranks: int, **options: Any) -> list[Any]:
    """Return the batches of each rank."""
    return [
        [*DataLoader(make(), 3, rank=rank, world_size=ranks, **options)]
        for rank in range(ranks)
    ]


@pytest.mark.slow
@given(
    st.integers(0, 40),
    st.booleans(),
    st.sampled_from(["wrap", "drop", "pad", "uneven", None]),
    st.integers(1, 5),
)
def test_ranks_have_equal_parts(
    length: int, shuffle: bool, tail: Any, ranks: int
) -> None:
    def make() -> Any:
        return from_dataset(Plain(length), shuffle=shuffle)

    options: Any = {"collate_fn": list} if tail is None else {
        "collate_fn": list, "tail": tail
    }  # fmt: skip
    parts = read_all(make, ranks, **options)
    if tail == "pad":
        parts = [[masked([batch]) for batch in one] for one in parts]
    elif tail != "uneven":
        assert len({*map(len, parts)}) == 1
    for rank in range(ranks):
        loader = DataLoader(make(), 3, rank=rank, world_size=ranks, **options)
        assert len(loader) == len(parts[rank])
    found = Counter(one for part in parts for batch in part for one in batch)
    whole = Counter(index**2 for index in range(length))
    if tail in {"uneven", "pad"}:
        assert found == whole
    elif tail == "drop":
        assert found <= whole
        assert found.total() == length - length % ranks
    else:
        assert found >= whole
        assert found.total() == length + -length % ranks


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_of_it_is_one_of_the_dataset(num_workers: int) -> None:
    dataset: Any = TensorDataset(torch.arange(50))
    options: Any = {"num_workers": 1, "fetch": "workers"} if num_workers else {}
    found = [*DataLoader(from_dataset(dataset), 8, **options)]
    for (one,), (other,) in zip(found, DataLoader(dataset, 8), strict=True):
        assert torch.equal(one, other)


async def test_steps_and_passes() -> None:
    stream = from_dataset(Plain(), shuffle=True).repeat().epoch_length(60)
    found = await items(stream)
    assert sorted(found[:N]) == sorted(found[N : 2 * N])
    assert found[:N] != found[N : 2 * N]
    assert from_dataset(Plain()).map(float).total() == N
    assert repr(from_dataset(Plain()).take(2)) == "stream of Plain.take(...)"


async def test_an_index_is_computed() -> None:
    """A dataset of any length starts at once."""

    class Endless(Plain):
        def __getitem__(self, index: int) -> int:
            return index

    stream = from_dataset(Endless(10**15), shuffle=True, seed=3)
    stream.set_epoch(7)
    order = ShuffledIndices(10**15, seed=3 * 0x9E3779B97F4A7C15)
    order.set_epoch(7)
    assert (await read(stream, 50))[0] == order.take(0, 50).tolist()
