"""How epochs are counted, and where loaders work: any thread, any loop."""

import asyncio
import copy
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import pytest
import sniffio
import trio
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

from aioloader import DataLoader, ShuffledIndices, get_worker_info
from aioloader._pipeline import pipeline as run
from aioloader.datasets import from_dataset
from faulty import first_time, kill_itself
from samples import AsyncMap, AsyncStream, SyncMap, SyncStream, collect, labels


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_iterators_are_two_epochs(num_workers: int) -> None:
    """Even if both are made before either is used."""

    def orders(*, at_once: bool) -> list[Any]:
        order = ShuffledIndices(20, seed=3)
        loader: Any = DataLoader(
            SyncMap(), 5, sampler=order, num_workers=num_workers, rng="worker"
        )
        made = [iter(loader), iter(loader)] if at_once else [loader, loader]
        return [labels(list(batches)) for batches in made]

    epochs = orders(at_once=True)
    assert epochs[0] != epochs[1]
    assert epochs == orders(at_once=False)


@pytest.mark.parametrize(
    "name", ["transform", "collate_fn", "concurrency", "timeout", "workers"]
)
def test_assigned_arguments_apply_to_the_next_iteration(name: str) -> None:
    """An iteration reads the attributes when it is made."""
    values: dict[str, Any] = {
        "transform": lambda sample: -sample,
        "collate_fn": sum,
        "concurrency": 3,
        "timeout": 20.0,
        "workers": "thread",
    }
    loader: Any = DataLoader([1, 2, 3], batch_size=3)
    assert name in vars(loader)
    before = iter(loader)
    setattr(loader, name, values[name])
    assert next(before).tolist() == [1, 2, 3]
    after = next(iter(loader))
    expected = {"transform": [-1, -2, -3], "collate_fn": 6}.get(name, [1, 2, 3])
    assert (after if isinstance(after, int) else after.tolist()) == expected
    setattr(loader, name, "none")
    with pytest.raises((TypeError, ValueError), match=f"{name}.* must|should .*none"):
        iter(loader)


def test_epoch_is_the_current_or_the_next_one() -> None:
    """``loader.epoch`` is the number in the state."""
    loader: Any = DataLoader(SyncMap(), 5)
    epochs = [loader.epoch]
    for _ in loader:
        epochs.append(loader.epoch)
        assert loader.state_dict()["epoch"] == loader.epoch
    epochs.append(loader.epoch)
    state = loader.state_dict()
    loader.set_epoch(7)
    epochs.append(loader.epoch)
    loader.load_state_dict(state)
    assert [*epochs, loader.epoch] == [0, *[0] * len(loader), 1, 7, 1]


def test_a_subclass_may_have_its_own_epoch() -> None:
    """The loader leaves its attribute alone."""

    class Counting(DataLoader[Any]):
        def __init__(self) -> None:
            self.epoch = "mine"  # type: ignore[assignment]
            super().__init__(SyncMap(), 5)

    loader: Any = Counting()
    list(loader)
    assert loader.epoch == "mine"


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader[Any](SyncMap(), 5, shuffle=True, rank=0, world_size=1),
        lambda: DataLoader[Any](SyncMap(), 5, sampler=ShuffledIndices(20)),
        lambda: DataLoader[Any](SyncMap(), None, sampler=ShuffledIndices(20)),
        lambda: DataLoader[Any](SyncMap(), 5),
    ],
    ids=["ranks", "shuffled", "no batches", "plain"],
)
def test_a_copy_counts_its_own_epochs(make: Any) -> None:
    """The copy's epochs do not change the original's."""
    reference = make()
    expected = [str(list(reference)) for _ in range(3)]
    loader = make()
    assert str(list(loader)) == expected[0]
    twin = copy.copy(loader)
    assert [str(list(twin)) for _ in range(2)] == expected[1:]
    assert (loader.epoch, twin.epoch) == (1, 3)
    twin.set_epoch(7)
    assert str(list(loader)) == expected[1]
    with pytest.raises(NotImplementedError, match="cannot be copied or pickled"):
        copy.copy(iter(loader))


@pytest.mark.parametrize("wrapped", [True, False])
def test_set_epoch_reaches_nested_samplers_once(wrapped: bool) -> None:
    """A DistributedSampler in a BatchSampler."""

    class Recording(DistributedSampler[Any]):
        epochs: ClassVar[list[int]] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    sampler = Recording(SyncMap(), num_replicas=2, rank=0)
    sampler.epochs.clear()
    options: Any = {"sampler": sampler}
    if wrapped:
        options = {"batch_sampler": BatchSampler(sampler, 2, drop_last=False)}
    DataLoader[Any](SyncMap(), **options).set_epoch(4)
    assert sampler.epochs == [4]


class OfEpoch(SyncMap):
    """Samples are the epoch; with a mark, epoch 3 kills a worker once."""

    current = -1

    def __init__(self, mark: Path | None = None) -> None:
        super().__init__(4)
        self.mark = mark

    def set_epoch(self, epoch: int) -> None:
        self.current = epoch

    def __getitem__(self, index: int) -> Any:
        if self.mark and self.current == 3 and first_time(self.mark):
            kill_itself()
        return self.current


class OfEpochAsync(OfEpoch):
    async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return self.current


class OfEpochStream(OfEpoch, IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        for _ in range(2):
            yield self.current


class Showing(OfEpoch):
    """Has its epoch as an attribute; the user sets it without the loader."""

    @property
    def epoch(self) -> int:
        return self.current


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("kind", [OfEpoch, OfEpochAsync, OfEpochStream])
def test_set_epoch_reaches_persistent_workers(kind: Any, method: str) -> None:
    """Before the first batch, as with workers that start with each epoch."""
    options: Any = {"persistent_workers": True, "multiprocessing_context": method}
    loader: Any = DataLoader(kind(), 2, num_workers=2, **options)
    epochs = []
    with loader:
        for epoch in (None, 3, None, 1):
            if epoch is not None:
                loader.set_epoch(epoch)
            epochs.append([batch.tolist() for batch in loader])
    assert epochs == [[[epoch] * 2] * 2 for epoch in (-1, 3, 3, 1)]


def test_an_epoch_of_the_dataset_reaches_persistent_workers() -> None:
    """The dataset has an ``epoch`` attribute, as Hugging Face's have."""
    dataset = Showing()
    loader: Any = DataLoader(dataset, num_workers=1, persistent_workers=True)
    epochs = []
    with loader:
        for epoch in (0, 5, 6):
            dataset.set_epoch(epoch)
            epochs.append({int(batch) for batch in loader})
    assert epochs == [{0}, {5}, {6}]


def test_an_epoch_of_a_stream_reaches_persistent_workers() -> None:
    """Each epoch has the same order as without workers."""
    stream = from_dataset(range(8), shuffle=True, seed=1)
    options: Any = {"num_workers": 1, "fetch": "workers", "persistent_workers": True}
    with DataLoader[Any](stream, 8, **options) as loader:
        for epoch in (0, 3, 5):
            stream.set_epoch(epoch)
            order = next(iter(DataLoader[Any](stream, 8))).tolist()
            assert [batch.tolist() for batch in loader] == [order]


def test_an_error_of_set_epoch_in_a_worker_is_raised() -> None:
    """The error keeps its type."""

    class Refusing(OfEpoch):
        def set_epoch(self, epoch: int) -> None:
            if get_worker_info():
                raise ArithmeticError(epoch)

    options: Any = {"num_workers": 1, "persistent_workers": True}
    with DataLoader[Any](Refusing(), **options) as loader:
        list(loader)
        loader.set_epoch(1)
        with pytest.raises(ArithmeticError, match="1"):
            list(loader)


def test_set_epoch_reaches_a_dead_workers_replacement(tmp_path: Path) -> None:
    """The replacement starts with the dataset as of the start of the workers."""
    dataset = OfEpoch(tmp_path / "killed")
    loader: Any = DataLoader(dataset, num_workers=1, persistent_workers=True)
    epochs = []
    with loader:
        for epoch in (2, 3, 4):
            loader.set_epoch(epoch)
            epochs.append({int(batch) for batch in loader})
    assert epochs == [{2}, {3}, {4}]
    assert (tmp_path / "killed").exists()


async def numbers() -> AsyncIterator[int]:
    for number in range(4):
        yield number


ONCE = r"each epoch needs a new generator; pass .*from_async_iterable\("
READ = r"iterator \(.*\) that was read before, .*" + ONCE


@pytest.mark.parametrize(
    "make",
    [numbers, lambda: (n for n in range(4)), lambda: map(int, range(4))],
    ids=["async generator", "generator", "map"],
)
@pytest.mark.parametrize("taken", [1, 3])
def test_a_generator_has_one_epoch(make: Any, taken: int) -> None:
    """A second epoch would silently lack the samples already read."""
    loader: Any = DataLoader(make(), 2)
    iterator, second = iter(loader), iter(loader)
    assert len(list(itertools.islice(iterator, taken))) == min(taken, 2)
    for again in (partial(next, second), partial(iter, loader)):
        with pytest.raises(TypeError, match=READ):
            again()
    iterator.close()


@pytest.mark.usefixtures("fork_is_default")
@pytest.mark.parametrize(
    "make",
    [lambda: (n for n in range(4)), lambda: map(int, "01")],
    ids=["generator", "map"],
)
def test_a_generator_needs_a_single_worker(make: Any) -> None:
    """Several workers would each read all samples from a copy."""
    with pytest.raises(TypeError, match=r"2 workers would read a copy.*" + ONCE):
        iter(DataLoader(make(), 2, num_workers=2))
    loader: Any = DataLoader(make(), 2, num_workers=1)
    assert next(iter(loader)).tolist() == [0, 1]


def test_a_generator_function_is_no_dataset() -> None:
    """The function must be called for each epoch."""
    with pytest.raises(TypeError, match=ONCE):
        DataLoader(numbers)


async def test_an_iterator_of_for_refuses_async_for() -> None:
    """``async for`` would run plain code on the event loop."""
    loader: Any = DataLoader(SyncMap(), 5)
    with pytest.raises(TypeError, match=r"made by iter\(loader\)"):
        async for _ in iter(loader):
            pass
    with pytest.raises(TypeError, match=r"aiter\(loader\)"):
        await anext(iter(loader))


EXPECTED = [[i, i + 1, i + 2, i + 3] for i in range(0, 20, 4)]
KINDS = [SyncMap, AsyncMap, SyncStream, AsyncStream]


@pytest.mark.parametrize("loop", ["thread", "caller"])
@pytest.mark.parametrize("make", KINDS)
async def test_nested_loops_over_a_loader_are_independent(make: Any, loop: Any) -> None:
    """Each inner loop is a whole epoch."""
    loader = DataLoader(make(), batch_size=4, loop=loop)
    inner = [[labels([b])[0] async for b in loader] async for _ in loader]
    assert inner == [EXPECTED] * 5


def test_threads_share_one_iterator() -> None:
    """Each batch goes to one of three threads."""
    for dataset in (SyncMap(), AsyncMap()):
        iterator = iter(DataLoader(dataset, batch_size=4, prefetch_factor=2))
        with ThreadPoolExecutor(3) as threads:
            parts: Any = threads.map(list, [iterator] * 3)
        assert sorted(labels([*itertools.chain(*parts)])) == EXPECTED


def test_for_cannot_use_the_callers_loop() -> None:
    """``for`` would block the loop that it waits for; plain reads need no loop."""
    with pytest.raises(RuntimeError, match="use `async for`, or loop='thread'"):
        next(iter(DataLoader(AsyncMap(), loop="caller")))
    assert len(list(DataLoader(SyncMap(), loop="caller"))) == 20


async def test_next_refuses_to_block_the_callers_loop() -> None:
    """``next`` on an iterator of ``async for``."""
    iterator = aiter(DataLoader(AsyncMap(), batch_size=4, loop="caller"))
    with pytest.raises(RuntimeError, match="a plain `for` would block it"):
        next(iterator)
    await iterator.aclose()


async def test_coroutines_run_on_the_chosen_loop() -> None:
    """The default is the loader's own loop."""
    seen: set[Any] = set()

    class Looking(AsyncMap):
        async def __getitem__(self, index: int) -> Any:
            seen.add(asyncio.get_running_loop())
            return await super().__getitem__(index)

    await collect(DataLoader(Looking(), loop="caller"))
    assert seen == {asyncio.get_running_loop()}
    seen.clear()
    await collect(DataLoader(Looking()))
    assert len(seen) == 1
    assert seen != {asyncio.get_running_loop()}


class Blocking(SyncMap):
    """Plain code that runs its own loop for an async dataset."""

    def __init__(self) -> None:
        super().__init__(4)
        self.inner = AsyncMap(4)

    def __getitem__(self, index: int) -> Any:
        return asyncio.run(self.inner[index])


async def test_plain_functions_do_not_run_on_the_loop() -> None:
    """Plain functions run in a thread of the loader, whatever ``loop`` is."""
    threads: set[str] = set()

    def look(value: Any) -> Any:
        threads.add(threading.current_thread().name)
        return value

    for loop in ("thread", "caller"):
        options: Any = {"transform": look, "collate_fn": look, "loop": loop}
        await collect(DataLoader(AsyncMap(), **options))
        assert labels(await collect(DataLoader(Blocking(), 4, loop=loop))) == [
            [0, 1, 2, 3]
        ]
    await collect(DataLoader(SyncMap(), transform=look, collate_fn=look))
    assert threads == {"aioloader-cpu"}


class AnyioMap(AsyncMap):
    """Reads by anyio, as datasets for any async library do."""

    async def __getitem__(self, index: int) -> Any:
        await anyio.lowlevel.checkpoint()
        assert sniffio.current_async_library() == "asyncio"
        return await super().__getitem__(index)


class AnyioStream(AsyncStream):
    async def __aiter__(self) -> AsyncIterator[Any]:
        await anyio.lowlevel.checkpoint()
        async for item in super().__aiter__():
            yield item


def iterate(make: Callable[[], Any]) -> list[list[int]]:
    return labels(list(DataLoader(make(), batch_size=4)))


async def iterate_plainly(make: Callable[[], Any]) -> list[list[int]]:
    return iterate(make)


async def iterate_async(make: Callable[[], Any], loop: Any) -> list[list[int]]:
    """Iterate twice while entered: the second epoch uses the running loop."""
    async with DataLoader(make(), batch_size=4, loop=loop) as loader:
        assert labels(await collect(loader)) == EXPECTED
        return labels(await collect(loader))


@pytest.mark.parametrize("loop", ["thread", "caller"])
@pytest.mark.parametrize("make", [*KINDS, AnyioMap, AnyioStream])
def test_loaders_work_in_an_anyio_application(make: Any, loop: Any) -> None:
    """anyio stores its backend in sniffio's context variable."""
    assert anyio.run(iterate_async, make, loop) == EXPECTED


@pytest.mark.blocking
@pytest.mark.parametrize("make", [*KINDS, AnyioMap, AnyioStream])
@pytest.mark.parametrize(
    "start",
    [trio.run, partial(anyio.run, backend="trio"), anyio.run],
    ids=["trio", "anyio on trio", "anyio"],
)
def test_for_works_inside_any_async_library(start: Any, make: Any) -> None:
    """The loader's own loop is asyncio's, whatever library runs around it."""
    assert start(iterate_plainly, make) == EXPECTED


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("loop", ["thread", "caller"])
@pytest.mark.parametrize("make", KINDS)
def test_async_for_under_trio_raises(make: Any, loop: Any, num_workers: int) -> None:
    """The error says that asyncio is needed; nothing is left running."""

    async def consume() -> None:
        loader = DataLoader(make(), batch_size=4, loop=loop, num_workers=num_workers)
        async for _ in loader:
            raise AssertionError("no batch can come")

    with pytest.raises(RuntimeError, match="needs asyncio"):
        trio.run(consume)


@pytest.mark.parametrize(
    "part", [(run.Pipeline, "main"), (run, "FetcherPool")], ids=["start", "tasks"]
)
@pytest.mark.parametrize("loop", ["thread", "caller"])
async def test_a_pipeline_that_cannot_start_raises(
    loop: Any, part: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch raises the error of the start."""

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise LookupError("planted")

    monkeypatch.setattr(*part, refuse)
    loader = DataLoader(AsyncMap(), batch_size=4, loop=loop)
    with pytest.raises(LookupError, match="planted"):
        await collect(loader)
    monkeypatch.undo()
    assert labels(await collect(loader)) == EXPECTED
