"""Reading single samples: by loaders and ranks, in merged requests, after failures."""

import asyncio
import itertools
import os
import random
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader import DataLoader, datasets
from aioloader.datasets import IndexedDataset, JSONLinesDataset, Piece, Requests
from aioloader.errors import ObjectPermissionError, StateMismatchError
from beside import beside
from loader.states import left_at, loaded
from resuming import assert_resumes_exactly, assert_resumes_exactly_async

N = 96
ORDER: dict[str, Any] = {"block": 4, "window": 32, "lanes": 4}


def shards_of(count: int = N, shards: int = 4) -> dict[str, bytes]:
    """Return shards with a number in each line."""
    lines, most = [b"%d\n" % number for number in range(count)], count // shards
    parts = [lines[shard * most : (shard + 1) * most] for shard in range(shards)]
    return {f"{i}.jsonl": b"".join(part) for i, part in enumerate(parts)}


class Shelf(datasets.Source):
    """Objects whose requests are counted, and may wait or fail at random."""

    label = "shelf://here"

    def __init__(self, objects: dict[str, bytes], failing: float = 0.0) -> None:
        self.objects, self.failing, self.random = objects, failing, random.Random(0)
        self.failures: dict[str, Exception] = {}  # of the next request of a key
        self.gets = self.under_way = 0
        self.entered: Any = None  # an event that is set by requests, and the one
        self.gate: Any = None  # that they wait for

    def close(self) -> None:
        """Make requests wait from now on."""
        self.entered, self.gate = asyncio.Event(), asyncio.Event()

    async def get(self, key: str, start: int, stop: int) -> Piece:
        self.gets += 1
        self.under_way += 1
        try:
            if self.gate is not None:
                self.entered.set()
                await self.gate.wait()
            if key not in self.objects:
                raise FileNotFoundError(key)
            if key in self.failures:
                raise self.failures.pop(key)
            if self.random.random() < self.failing:
                raise OSError("at random")
            data = self.objects[key]
            version = datasets.Version(len(data), f'"{zlib.crc32(data)}"')
            return Piece(data[start:stop], version)
        finally:
            self.under_way -= 1


async def indexed(shelf: Shelf) -> Any:
    """Return the indexed numbers of a shelf, whose requests are counted from now on."""
    options: Any = {"store": shelf, "requests": Requests(base_delay=0)}
    stream = JSONLinesDataset(sorted(shelf.objects), **options)
    dataset = await IndexedDataset.discover(stream, scan=True)
    shelf.gets = 0
    return dataset


def local(folder: Path, prefix: str = "", time: float = 7.0, **given: int) -> Any:
    """Return indexed numbers in files that have the same time."""
    folder.mkdir(exist_ok=True)
    for name, data in shards_of(**given).items():
        path = folder / f"{prefix}{name}"
        path.write_bytes(data)
        os.utime(path, (time, time))
    return IndexedDataset(JSONLinesDataset(f"{folder}/*.jsonl"), scan=True)


def loader_of(dataset: Any, ranks: int = 1, rank: int = 0, **options: Any) -> Any:
    """Return the loader of a rank; eight samples are a batch of all ranks."""
    given = {name: options.pop(name) for name in (*ORDER, "seed") if name in options}
    options |= {"rank": rank, "world_size": ranks, "tail": "uneven"}
    sampler = dataset.shuffled(**ORDER | given)
    return DataLoader(dataset, 8 // ranks, sampler=sampler, **options)


def batches_of(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(batches: Any) -> list[int]:
    return [*itertools.chain(*batches)]


# -- the order -------------------------------------------------------------------------


@pytest.mark.law
@pytest.mark.one_loop
@given(
    shape=st.tuples(st.integers(0, 300), st.integers(1, 20), st.integers(0, 400)),
    seed=st.integers(-(2**70), 2**70),
    lanes=st.integers(1, 70),
)
async def test_shuffled_blocks_have_each_index_once(
    shape: tuple[int, int, int], seed: int, lanes: int
) -> None:
    """A position that is looked up alone is that of iteration, in each epoch."""
    n, block, window = shape
    dataset = await indexed(Shelf(shards_of(n, 1)))
    order = dataset.shuffled(block=block, window=window, seed=seed, lanes=lanes)
    for epoch in (0, 1):
        order.set_epoch(epoch)
        listed = [*order]
        assert sorted(listed) == [*range(n)]
        assert [order[position] for position in range(n)] == listed
        assert order.take(n // 3, n).tolist() == listed[n // 3 :]


@pytest.mark.law
@pytest.mark.one_loop
@given(*map(st.integers, [1, 1, 0, 1], [9, 9, 200, 4]), st.integers(1, 6))
async def test_blocks_stay_on_one_rank(
    blocks: int, block: int, window: int, lanes: int, ranks: int
) -> None:
    lanes *= ranks
    dataset = await indexed(Shelf(shards_of(blocks * block * lanes, 1)))
    order = [*dataset.shuffled(block=block, window=window, seed=5, lanes=lanes)]
    owned = [{index // block for index in order[rank::ranks]} for rank in range(ranks)]
    assert sum(map(len, owned)) == blocks * lanes


@pytest.mark.parametrize("wrong", [{"block": 0}, {"lanes": 0}, {"window": -1}])
def test_wrong_orders_are_refused(wrong: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1, and window at least 0, got"):
        local(tmp_path).shuffled(**wrong)


# -- loaders ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")
@pytest.mark.parametrize("kind", ["local", "stored"])
async def test_ranks_with_workers_share_each_epoch(kind: str, tmp_path: Path) -> None:
    """Each sample comes once; each epoch has another order."""
    if kind == "local":
        dataset = await beside(lambda: local(tmp_path))
    else:
        dataset = await indexed(Shelf(shards_of()))
    loaders = [loader_of(dataset, 2, rank, num_workers=4) for rank in range(2)]
    epochs = []
    for _ in range(2):
        parts = [await beside(partial(batches_of, loader)) for loader in loaders]
        epochs.append(flat(flat(parts)))
        assert sorted(epochs[-1]) == [*range(N)]
    assert epochs[0] != epochs[1]


def test_a_loader_resumes_after_any_batch(tmp_path: Path) -> None:
    dataset = local(tmp_path)
    assert_resumes_exactly(lambda: loader_of(dataset))


async def test_a_loader_resumes_with_merged_requests() -> None:
    dataset = await indexed(Shelf(shards_of()))
    await assert_resumes_exactly_async(lambda: loader_of(dataset), stops=[0, 1, 7, 12])


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_state_resumes_on_other_ranks(ranks: int, tmp_path: Path) -> None:
    """From any rank's state, the batches of all ranks are the same sets."""
    dataset = local(tmp_path)

    def rest(state: Any) -> list[list[int]]:
        every = (loader_of(dataset, ranks, rank) for rank in range(ranks))
        parts = [batches_of(loaded(loader, state)) for loader in every]
        return [sorted(flat(batches)) for batches in zip(*parts, strict=True)]

    whole = rest(left_at(loader_of(dataset, 2), 0))
    assert sorted(flat(whole)) == [*range(N)]
    for k in range(N // 8):
        assert rest(left_at(loader_of(dataset, 2, k % 2), k)) == whole[k:]


# Changed shards, a changed order, and the words of the error.
OTHERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"block": 8}, "block=4 of the sampler, but .* has block=8 of"),
    ({}, {"window": 8}, "window=32 of the sampler, but .* has window=8 of"),
    ({}, {"lanes": 2}, "lanes=4 of the sampler, but .* has lanes=2 of"),
    ({}, {"seed": 3}, "the seed 0 of the sampler, but .* the seed 3 of"),
    ({"prefix": "x"}, {}, "shards of the fingerprint .* with the same shards"),
    ({"shards": 3}, {}, "shards of the fingerprint .* with the same shards"),
    ({"count": 88}, {}, "saved for 96 samples, but the dataset has 88"),
    ({"time": 8.0}, {}, "versions .* if they are copies .* with strict=False"),
]


@pytest.mark.parametrize(("shards", "order", "words"), OTHERS)
def test_states_of_other_orders_or_shards_are_refused(
    shards: dict[str, Any], order: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """With strict=False, a state of copies with other times is loaded."""
    dataset = local(tmp_path / "a")
    state = left_at(loader_of(dataset), 3)
    changed = loader_of(local(tmp_path / "b", **shards), **order)
    with pytest.raises(StateMismatchError, match=words):
        changed.load_state_dict(state)
    if "time" in shards:
        changed.load_state_dict(state, strict=False)
        assert batches_of(changed) == batches_of(loaded(loader_of(dataset), state))


@pytest.mark.parametrize("order", ["plain", "shuffled"])
async def test_failed_requests_lose_nothing(order: str) -> None:
    dataset = await indexed(shelf := Shelf(shards_of(), failing=0.3))
    loader = loader_of(dataset) if order == "shuffled" else DataLoader(dataset, 8)
    for _ in range(3):
        assert sorted(flat([batch.tolist() async for batch in loader])) == [*range(N)]
    assert shelf.under_way == 0


@pytest.mark.parametrize("kind", ["local", "stored"])
async def test_a_damaged_sample_fails_alone(kind: str, tmp_path: Path) -> None:
    """Although a batch of local samples is read at once."""
    shards = {"0.jsonl": b"0\n1\nnope{\n3\n"}
    (tmp_path / "0.jsonl").write_bytes(shards["0.jsonl"])
    stream = JSONLinesDataset(f"{tmp_path}/0.jsonl")
    dataset: Any = await IndexedDataset.discover(stream, scan=True)
    if kind == "stored":
        dataset = await indexed(Shelf(shards))
    loader: Any = DataLoader(dataset, 4, on_error="skip")
    assert [batch.tolist() async for batch in loader] == [[0, 1, 3]]


# -- requests --------------------------------------------------------------------------

LARGE = "x" * 70_000  # more than the gap over which reads are merged
FAR = {"0.jsonl": f'0\n1\n"{LARGE}"\n3\n4\n'.encode(), "1.jsonl": b"5\n6\n"}


@pytest.mark.parametrize(
    ("indices", "requests"),
    [([1], 1), ([1, 0, 1], 1), ([4, 2, 0], 1), ([0, 1, 3, 4], 2), ([4, 5], 2)],
)
async def test_reads_of_one_loop_turn_share_requests(
    indices: list[int], requests: int
) -> None:
    """Gaps up to 64 KiB are merged, but not different shards."""
    dataset = await indexed(shelf := Shelf(FAR))
    async with dataset:
        samples = await asyncio.gather(*(dataset[index] for index in indices))
    expected = [0, 1, LARGE, 3, 4, 5, 6]
    assert samples == [expected[index] for index in indices]
    assert shelf.gets == requests


async def test_a_block_is_one_request() -> None:
    """A loader may merge several blocks that are close."""
    dataset = await indexed(shelf := Shelf(shards_of()))
    order = dataset.shuffled(block=6, window=48, lanes=4)
    async with dataset:
        assert sorted([await dataset[index] for index in order]) == [*range(N)]
    assert shelf.gets == N // 6
    loader: Any = DataLoader(dataset, 8, sampler=order)
    assert len([batch async for batch in loader]) == N // 8
    assert shelf.gets <= 2 * N // 6


async def wait_for_others() -> None:
    """Wait for all other tasks to end, as those of cancelled requests do at once."""
    if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        _, pending = await asyncio.wait(tasks, timeout=20)
        assert not pending


@pytest.mark.parametrize("order", ["plain", "shuffled"])
async def test_cancelled_reads_leave_no_request(order: str) -> None:
    """After any number of turns of the loop."""
    dataset = await indexed(shelf := Shelf(shards_of()))
    indices: Any = dataset.shuffled(**ORDER) if order == "shuffled" else range(N)
    async with dataset:
        for turns in range(10):
            shelf.close()
            reads = [asyncio.create_task(dataset[indices[i]]) for i in range(50)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for read in reads:
                read.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
            await wait_for_others()
            assert shelf.under_way == 0
        shelf.gate = None
        samples = await asyncio.gather(*(dataset[index] for index in indices))
        assert sorted(samples) == [*range(N)]


@pytest.mark.parametrize("cancelled", [1, 2, 3])
async def test_a_merged_request_ends_with_its_last_reader(cancelled: int) -> None:
    dataset = await indexed(shelf := Shelf(shards_of()))
    async with dataset:
        shelf.close()
        reads = [asyncio.create_task(dataset[index]) for index in range(3)]
        await shelf.entered.wait()
        for read in reads[:cancelled]:
            read.cancel()
        await asyncio.wait(reads[:cancelled])
        if cancelled == 3:
            await wait_for_others()
        assert shelf.under_way == (cancelled < 3)
        shelf.gate.set()
        assert await asyncio.gather(*reads[cancelled:]) == [*range(cancelled, 3)]
    assert shelf.gets == 1


class OddError(ValueError):
    """Cannot be made from its args alone."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize(
    ("failure", "kind"),
    [(PermissionError(13, "no"), ObjectPermissionError), (OddError(1, 2), OddError)],
)
async def test_a_failed_request_fails_only_its_own_samples(
    failure: Exception, kind: type[Exception]
) -> None:
    """Each with a separate error; a second try reads them."""
    dataset, indices = await indexed(shelf := Shelf(shards_of())), [0, 1, 2, N - 1]
    async with dataset:
        shelf.failures["0.jsonl"] = failure
        shelf.close()
        reads = [asyncio.create_task(dataset[index]) for index in indices]
        await shelf.entered.wait()
        shelf.gate.set()
        *errors, last = await asyncio.gather(*reads, return_exceptions=True)
        assert [*map(type, errors), last] == [kind] * 3 + [N - 1]
        if kind is ObjectPermissionError:
            assert len({*map(id, errors)}) == 3
            assert {error.__cause__ for error in errors} == {failure}
        assert [await dataset[index] for index in indices] == indices
