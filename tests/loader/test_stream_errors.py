"""Errors of iterables that would silently end a loop or a task if not caught."""

import asyncio
import contextlib
import inspect
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch.utils.data import Sampler

from aioloader import DataLoader
from aioloader.datasets import TextDataset, from_async_iterable, from_iterable
from aioloader.testing import no_leaks
from core.kit import INLINE, WAYS, make, outcomes
from failing import OddError, drain, failing
from faults.error_table import (
    AsyncSamples,
    AsyncSteps,
    AsyncUnopened,
    N,
    PlainSteps,
    Raiser,
    Samples,
    Unopened,
    same,
)
from resuming import assert_resumes_exactly
from samples import AsyncMap, SyncMap

CONTROL = [asyncio.CancelledError, StopIteration, StopAsyncIteration]


def cause_of(results: list[Any]) -> BaseException:
    """Return the cause of the only error, which must note its place."""
    (error,) = [result for result in results if isinstance(result, Exception)]
    assert type(error) is RuntimeError
    assert any("in stage 'fetch' of epoch 0, batch" in n for n in error.__notes__)
    assert error.__cause__ is not None
    return error.__cause__


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", CONTROL)
@pytest.mark.parametrize("dataset", [Unopened, AsyncUnopened])
async def test_an_iterable_that_cannot_be_opened_raises(
    way: str, dataset: Any, error: type[BaseException]
) -> None:
    """The iterable does not count as empty, and is not skipped."""
    with no_leaks():
        loader = make(way, dataset(Raiser(error)), on_error="skip")
        results = await asyncio.wait_for(drain(way, loader), 20)
    assert type(cause_of(results)) is error
    assert len(results) == 1


# -- streams of aioloader --------------------------------------------------------------

STEPS: dict[str, Callable[[Any], Any]] = {
    "iterable": lambda raiser: from_iterable(lambda: PlainSteps(raiser)),
    "async iterable": lambda raiser: from_async_iterable(lambda: AsyncSteps(raiser)),
    "map": lambda raiser: from_iterable(range(N)).map(raiser),
    "async map": lambda raiser: from_iterable(range(N)).map(raiser.later),
    "filter": lambda raiser: from_iterable(range(1, N + 1)).filter(raiser),
    "async filter": lambda raiser: from_iterable(range(1, N + 1)).filter(raiser.later),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STEPS)
async def test_a_cancelled_step_fails_one_sample(way: str, name: str) -> None:
    """In any kind of step."""

    def stream() -> Any:
        return STEPS[name](Raiser(asyncio.CancelledError))

    for variant in (stream(), stream().shuffle(20), stream().readers(2)):
        loader = make(way, variant, on_error="skip")
        batches = await asyncio.wait_for(drain(way, loader), 20)
        samples = sorted(number % N for batch in batches for number in batch)
        assert samples == [0, 1, 2, 4, 5, 6, 7]
        (failure,) = loader.skipped
        assert type(failure.error) is RuntimeError
        assert type(failure.error.__cause__) is asyncio.CancelledError


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_stream_that_cannot_be_opened_raises_once(
    way: str, policy: Any, tmp_path: Any
) -> None:
    """Whatever the policy; there is no error for each sample."""
    dataset = TextDataset("*.txt", store=tmp_path)
    loader = make(way, dataset, on_error=policy)
    (error,) = await asyncio.wait_for(drain(way, loader), 20)
    assert "no shard matches" in str(error)
    assert "in stage 'fetch' of epoch 0, batch 0" in error.__notes__[-1]


class FailsLater:
    """Fails when it is read again: at sample ``bad``, or at once if negative."""

    def __init__(self, bad: int) -> None:
        self.times, self.bad = 0, bad

    def samples(self) -> Any:
        self.times += 1
        if self.times == 2 and self.bad < 0:
            raise OSError("connection lost")
        return self.each(self.times)

    def each(self, times: int) -> Any:
        for number in range(10):
            if number == self.bad and times == 2:
                raise OSError("connection lost")
            yield number

    def __iter__(self) -> Any:
        return self.samples()


class FailsLaterAsync(FailsLater):
    async def __aiter__(self) -> Any:
        for number in self.samples():
            yield number


@pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning")
@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("bad", [-1, 2])
@pytest.mark.parametrize(
    "of",
    [FailsLater, FailsLaterAsync, lambda bad: from_iterable(FailsLater(bad).samples)],
)
def test_an_error_while_reading_again_is_raised(of: Any, bad: int, policy: Any) -> None:
    """A resumed epoch must not end early."""
    dataset = of(bad)
    loader: Any = DataLoader(dataset, 2, on_error=policy)
    iterator = iter(loader)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    state = loader.state_dict()
    iterator.close()
    resumed: Any = DataLoader(dataset, 2, on_error=policy)
    resumed.load_state_dict(state)
    with pytest.raises(OSError, match="connection lost") as caught:
        list(resumed)
    assert "in stage 'fetch' of epoch 0, batch 2" in caught.value.__notes__[-1]


# -- several ranks ---------------------------------------------------------------------


class Few:
    """Some numbers; those at ``bad`` raise."""

    def __init__(self, n: int, *bad: int) -> None:
        self.n, self.bad = n, bad
        self.row = -1

    def step(self, stop: type[BaseException]) -> int:
        self.row += 1
        if self.row == self.n:
            raise stop
        if self.row in self.bad:
            raise OSError("bad row")
        return self.row

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        return self.step(StopIteration)


class AsyncFew(Few):
    __iter__ = None  # type: ignore[assignment]

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> int:
        return self.step(StopAsyncIteration)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dataset", [Few, AsyncFew])
async def test_a_skipped_sample_is_no_padding(way: str, dataset: Any) -> None:
    """A rank pads with the latest sample that it read, or with another rank's."""

    async def run(n: int, bad: int, rank: int, world_size: int) -> list[Any]:
        options: Any = {"rank": rank, "world_size": world_size, "on_error": "skip"}
        return await drain(way, make(way, dataset(n, bad), batch_size=2, **options))

    assert await run(5, 3, rank=1, world_size=2) == [[1], [1]]
    assert await run(2, 1, rank=2, world_size=3) == [[0]]


@pytest.mark.parametrize("dataset", [Few, AsyncFew])
def test_ranks_stay_aligned_after_an_error(dataset: Any) -> None:
    """A rank that raised reads as far as the others, and no further."""
    read = set()
    for rank in range(2):
        loader: Any = DataLoader(dataset(12, 1), 2, rank=rank, world_size=2)
        iterator = iter(loader)
        if rank == 1:
            with pytest.raises(OSError, match="bad row"):
                next(iterator)
        else:
            assert next(iterator).tolist() == [0, 2]
        assert next(iterator).tolist() == [4 + rank, 6 + rank]
        read.add(repr(loader.state_dict()["states"]))
        iterator.close()
    assert len(read) == 1


# -- of samples and steps --------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base", [SyncMap, AsyncMap])
async def test_an_error_keeps_its_type_and_notes_its_place(way: str, base: Any) -> None:
    """The batches before and after it are delivered."""
    dataset = failing(base, 5, error=lambda: OddError(1, 2))
    results = await drain(way, make(way, dataset))
    assert [results[0], results[2]] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert type(results[1]) is OddError
    assert results[1].__notes__ == [
        "aioloader: in stage 'fetch' of epoch 0, batch 1, sample index 5"
    ]
    assert any(
        frame.name == "__getitem__"
        for frame in __import__("traceback").extract_tb(results[1].__traceback__)
    )


NOTES = {
    "transform": "stage 'transform' of epoch 0, batch 1, sample index 3",
    "collate_fn": "stage 'collate' of epoch 0, batch 1, sample indices [2, 3]",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", [INLINE, *WAYS])
@pytest.mark.parametrize("base", [Samples, AsyncSamples, PlainSteps, AsyncSteps])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("stage", NOTES)
async def test_transform_and_collate_errors_name_their_stage(
    way: str, base: Any, is_async: bool, stage: str
) -> None:
    raiser = Raiser(ValueError)
    options: Any = {"batch_size": 2, stage: raiser.later if is_async else raiser}
    results = await outcomes(way, make(way, base(same), **options))
    (error,) = [result for result in results if isinstance(result, ValueError)]
    assert len(results) == 4
    assert NOTES[stage] in error.__notes__[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_async", [False, True])
async def test_batch_reads_reach_collate_fn_unchanged(way: str, is_async: bool) -> None:
    """As in torch; a batch may be columns, or fewer rows than indices."""

    class Sync(SyncMap):
        def __getitems__(self, indices: list[int]) -> Any:
            return {"x": torch.tensor(indices[:2]), "y": len(indices)}

    class Async(AsyncMap):
        async def __getitems__(self, indices: list[int]) -> Any:
            return {"x": torch.tensor(indices[:2]), "y": len(indices)}

    dataset: Any = Async(4) if is_async else Sync(4)
    loader = make(way, dataset, collate_fn=lambda batch: batch["x"] * batch["y"])
    assert await drain(way, loader) == [[0, 4]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base", [SyncMap, AsyncMap])
async def test_batch_samplers_may_yield_any_container(way: str, base: Any) -> None:
    """Empty batches are delivered, too."""

    async def run(batches: Any) -> list[Any]:
        options: Any = {"transform": lambda pair: pair[1], "collate_fn": torch.tensor}
        options |= {"batch_size": 1, "batch_sampler": batches}
        return await drain(way, make(way, base(4), **options))

    odd = [iter([0, 1]), {2}, (3,), [], torch.tensor([0, 2])]
    assert await run(odd) == [[0, 1], [2], [3], [], [0, 2]]
    assert await run([]) == []
    assert isinstance((await run([7]))[0], TypeError)


# -- methods of users that have names of the loader's own protocols --------------------

READ_AGAIN = "ignore:.* has no state_dict:UserWarning"


class Named:
    """Members that the loader must not use."""

    fills = False
    ranks = (5, 9)
    num_readers = 7

    def begin_epoch(self, *_args: Any) -> Any:
        raise AssertionError("it means something else")

    epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, as the loader may."""
        self.epoch = epoch

    pull = shard = readers = lifespan = open = begin_epoch
    # As ``h5py.File`` and Hugging Face's ``Dataset`` have them.
    __enter__ = __exit__ = __aenter__ = __aexit__ = begin_epoch


class Row(Named):
    def __init__(self, n: int) -> None:
        self.left = iter(range(n))

    def __iter__(self) -> "Row":
        return self

    def __next__(self) -> int:
        return next(self.left)


class AsyncRow(Named):
    def __init__(self, n: int) -> None:
        self.left = iter(range(n))

    def __aiter__(self) -> "AsyncRow":
        return self

    async def __anext__(self) -> int:
        for number in self.left:
            return number
        raise StopAsyncIteration


class Plain(Named):
    def __iter__(self) -> Row:
        return Row(10)


class Async(Named):
    def __aiter__(self) -> AsyncRow:
        return AsyncRow(10)


class Map(Named):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


BATCHES = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
KINDS = pytest.mark.parametrize("kind", [Plain, Async, Map])


@KINDS
@pytest.mark.parametrize("way", WAYS)
async def test_methods_named_like_ours_are_not_called(way: str, kind: Any) -> None:
    """Samples are read one by one, and split among ranks as usual."""
    assert await drain(way, make(way, kind())) == BATCHES
    loader = make(way, kind(), rank=1, world_size=2, tail="uneven")
    assert await drain(way, loader) == [[1, 3, 5, 7], [9]]
    loader.set_epoch(3)  # the only way in which an epoch is announced
    assert loader.dataset.epoch == 3


PROCESSES = partial(ProcessPoolExecutor, mp_context=get_context("fork"))
PLACES: dict[str, dict[str, Any]] = {
    "deadline": {"timeout": 60},
    "process": {"num_workers": 1, "fetch": "workers"},
    "loader reads": {"num_workers": 1, "fetch": "loader"},
    "threads": {"num_workers": 2, "workers": "thread"},
    "executor": {"num_workers": 1, "workers": ThreadPoolExecutor},
    "executor of processes": {"num_workers": 1, "workers": PROCESSES},
}


@KINDS
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
async def test_workers_call_no_such_methods(place: str, way: str, kind: Any) -> None:
    """In any epoch, and also while the loader is entered."""
    options = PLACES[place]
    with contextlib.ExitStack() as stack:
        if callable(options.get("workers")):
            options = {**options, "workers": stack.enter_context(options["workers"](1))}
        loader = make(way, kind(), **options)
        assert await drain(way, loader) == BATCHES
        async with loader:
            assert await drain(way, loader) == BATCHES


class Stateful(Async):
    """The dataset has a state."""

    def __init__(self) -> None:
        self.row = AsyncRow(10)
        self.place = 0

    async def __aiter__(self) -> Any:
        while self.place < 10:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Private(AsyncRow):
    """An iterator whose state is not for the dataset."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(0)
        self.dataset = dataset

    async def __anext__(self) -> int:
        if self.dataset.place == 10:
            self.dataset.place = 0
            raise StopAsyncIteration
        self.dataset.place += 1
        return int(self.dataset.place - 1)

    def state_dict(self) -> dict[str, str]:
        return {"not": "for the dataset"}


class WithPrivate(Stateful):
    """The dataset has a state, and so has its iterator."""

    def __aiter__(self) -> Any:
        return Private(self)


@pytest.mark.parametrize("kind", [Stateful, WithPrivate])
def test_only_the_datasets_own_state_is_loaded(kind: Any) -> None:
    """The state of an iterator is not loaded into its dataset."""
    assert_resumes_exactly(lambda: DataLoader(kind(), 3))


class Wrapper:
    """A user's dataset around one of aioloader's streams."""

    def __init__(self) -> None:
        self.stream = from_iterable(range(10))

    def __aiter__(self) -> Any:
        return aiter(self.stream)


@pytest.mark.parametrize("way", WAYS)
async def test_a_wrapped_stream_is_split_among_ranks(way: str) -> None:
    """The stream does not know its ranks, so the loader splits it."""
    loader = make(way, Wrapper(), rank=1, world_size=2, tail="uneven")
    assert await drain(way, loader) == [[1, 3, 5, 7], [9]]


class Buckets(Sampler[list[int]]):
    """Its ``state_dict`` takes the number of steps."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2], [3, 4]])

    def state_dict(self, num_steps: int) -> dict[str, int]:
        return {"last": num_steps}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("it means something else")


class ModuleRows(torch.nn.Module):
    """A dataset that is a module, whose state is its data."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.arange(5)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        return 2 * self.rows[index]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it is not a position")

    state_dict.__signature__ = inspect.signature(torch.nn.Module.state_dict)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_state_dicts_of_other_protocols_are_ignored(num_workers: int) -> None:
    """The loader neither calls nor saves them."""
    with DataLoader(
        ModuleRows(), batch_sampler=Buckets(), num_workers=num_workers
    ) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 2]
        state = json.loads(json.dumps(loader.state_dict()))
        assert [batch.tolist() for batch in batches] == [[4], [6, 8]]
        loader.load_state_dict(state)
        with pytest.warns(UserWarning, match="Buckets has no state_dict"):
            assert [batch.tolist() for batch in loader] == [[4], [6, 8]]


@pytest.mark.filterwarnings(READ_AGAIN, "ignore:Wrapper.stream._epoch had changed")
@pytest.mark.parametrize("kind", [Plain, Async, Map, Wrapper])
def test_datasets_without_a_state_resume_by_counting(kind: Any) -> None:
    """The epoch of a wrapped stream, which its shuffling depends on, is not saved."""
    assert_resumes_exactly(lambda: DataLoader(kind(), 3))
