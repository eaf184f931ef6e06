"""A loader's state: wherever an epoch is left, the rest is the same in every bit."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from aioloader import DataLoader, ShuffledIndices
from beside import beside
from resuming import assert_resumes_exactly, assert_resumes_exactly_async
from samples import AsyncBatchMap, AsyncMap, SyncMap
from working import Drawing, Numbers, draw, draw_own

Loader: Any = DataLoader  # options are tables here
Make = Callable[..., DataLoader[Any]]


def seeded(seed: int = 7) -> torch.Generator:
    """Return a generator of the user's."""
    return torch.Generator().manual_seed(seed)


def make(dataset: Any, *arguments: Any, **options: Any) -> Make:
    """Return what makes such a loader; more options change it."""
    return lambda **more: Loader(dataset, *arguments, **options, **more)


LOADERS: dict[str, Make] = {
    "in order": make(Numbers(10), 3),
    "shuffled": make(Numbers(10), 3, shuffle=True),
    "generator": lambda **more: DataLoader(
        Numbers(10), 3, shuffle=True, drop_last=True, generator=seeded(), **more
    ),
    "single": make(Numbers(5), None, shuffle=True),
    "tensors": make(TensorDataset(torch.arange(10)), 3, shuffle=True),
    "draws by batch": make(Drawing(10), 3, shuffle=True, rng="batch"),
    "draws by sample": make(Numbers(10), 3, transform=draw, rng="sample"),
    "moved": make(Drawing(10), 3, shuffle=True, rng="batch", device="cpu"),
    "ahead": make(Numbers(10), 3, shuffle=True, prefetch_factor=4),
    "threads": make(
        Numbers(10),
        3,
        shuffle=True,
        transform=draw_own,
        num_workers=3,
        workers="thread",
    ),
    "thread": make(
        AsyncMap(10), 3, transform=draw_own, num_workers=1, workers="thread"
    ),
    "async": make(AsyncMap(10), 3, shuffle=True),
    "async, one by one": make(AsyncMap(7), 2, shuffle=True, concurrency=1),
    "async batches": make(AsyncBatchMap(10), 3, shuffle=True),
    "async draws": make(AsyncMap(10), 3, transform=draw, rng="batch"),
    "any order": make(AsyncMap(10), 2, shuffle=True, in_order=False),
    "threads, any order": make(
        Numbers(10), 2, num_workers=3, workers="thread", in_order=False
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
def test_every_k(name: str) -> None:
    """By ``for``: twice in a row, and the epoch that follows."""
    assert_resumes_exactly(LOADERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
async def test_every_k_for_tasks(name: str) -> None:
    """By ``async for``."""
    await assert_resumes_exactly_async(LOADERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LOADERS if name.startswith("async")])
async def test_every_k_on_the_callers_loop(name: str) -> None:
    """By tasks of the loop that also reads."""
    await assert_resumes_exactly_async(lambda: LOADERS[name](loop="caller"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "others"),
    [
        ({}, {"num_workers": 3, "workers": "thread"}),
        ({"num_workers": 3, "workers": "thread"}, {"prefetch_factor": 4}),
        ({"num_workers": 1, "workers": "thread"}, {"device": "cpu"}),
        ({"device": "cpu"}, {"in_order": False}),
    ],
    ids=str,
)
def test_other_places(options: dict[str, Any], others: dict[str, Any]) -> None:
    """What delivers the rest may be another kind of loader."""
    name = "generator"
    assert_resumes_exactly(
        lambda: LOADERS[name](**options), resume_in=lambda: LOADERS[name](**others)
    )


async def test_other_hosts() -> None:
    """Left on the private loop, resumed on the caller's."""
    await assert_resumes_exactly_async(
        LOADERS["async"], resume_in=lambda: LOADERS["async"](loop="caller")
    )


# -- while batches are ready ------------------------------------------------------


class Gated:
    """Numbers; some wait until they are let go, and it is seen what was read."""

    def __init__(self, n: int, closed: set[int] | None = None) -> None:
        self.n = n
        self.closed = closed or set()
        self.gate = threading.Event()
        self.read: list[int] = []
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if index in self.closed:
            assert self.gate.wait(10)
        with self._changed:
            self.read.append(index)
            self._changed.notify_all()
        return index

    def wait_for(self, count: int) -> None:
        """Wait until so many samples were read."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.read) >= count, 10)


def test_what_is_ready_is_not_delivered() -> None:
    """Four batches beyond the first are read; the state is behind the first."""
    dataset = Gated(20)
    loader: Any = DataLoader(dataset, 2, prefetch_factor=4)
    iterator = iter(loader)
    next(iterator)
    dataset.wait_for(10)
    state = loader.state_dict()
    assert state["done"] == 1
    iterator.close()
    resumed: Any = DataLoader(Gated(20), 2)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [
        [place, place + 1] for place in range(2, 20, 2)
    ]


@pytest.mark.parametrize("taken", range(1, 7))
def test_out_of_order(taken: int) -> None:
    """The first batch comes last: what was delivered before it is not read again."""
    dataset = Gated(14, closed={0})
    options: dict[str, Any] = {
        "num_workers": 2,
        "workers": "thread",
        "in_order": False,
        "batch_size": 2,
        "shuffle": False,
    }
    loader: Any = DataLoader(dataset, **options)
    iterator = iter(loader)
    delivered = [next(iterator).tolist() for _ in range(taken)]
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["done"] == 0
    assert state["beyond"] == sorted(first // 2 for first, _ in delivered)
    dataset.gate.set()
    iterator.close()
    again = Gated(14)
    resumed: Any = DataLoader(again, **options | {"num_workers": 1})
    resumed.load_state_dict(state)
    delivered += [batch.tolist() for batch in resumed]
    found = [index for batch in delivered for index in batch]
    assert sorted(found) == list(range(14))
    assert sorted(again.read) == sorted(found[2 * taken :])


async def test_from_a_task_and_a_thread() -> None:
    """Whoever asks between two batches gets the same state."""
    loader: Any = DataLoader(AsyncMap(20), 2, shuffle=True)
    iterator = aiter(loader)
    for done in range(1, 5):
        await anext(iterator)

        async def ask() -> Any:
            return loader.state_dict()

        state = await asyncio.create_task(ask())
        assert state["done"] == done
        assert await beside(loader.state_dict) == state == loader.state_dict()
    await iterator.aclose()


# -- what frameworks do -----------------------------------------------------------


def numbers(batches: Any) -> list[Any]:
    """Return batches as lists."""
    return [batch.tolist() for batch in batches]


def test_iterators_that_are_dropped() -> None:
    """A loaded state waits for the first batch that is asked for."""
    loader = LOADERS["generator"]()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    resumed = LOADERS["generator"]()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    iter(resumed)
    assert resumed.state_dict() == state
    assert numbers(iter(resumed)) == numbers(iterator)


@pytest.mark.parametrize("name", ["in order", "tensors", "ahead", "threads", "async"])
def test_the_end_of_an_epoch(name: str) -> None:
    """It is over once it was seen to end; until then a state resumes into its end."""
    loader = LOADERS[name]()
    iterator = iter(loader)
    for _ in range(len(loader)):
        next(iterator)
    inside = loader.state_dict()
    assert (inside["epoch"], inside["done"]) == (0, len(loader))
    assert next(iterator, None) is None
    behind = loader.state_dict()
    assert (behind["epoch"], behind["done"]) == (1, 0)
    resumed = LOADERS[name]()
    resumed.load_state_dict(inside)
    assert list(resumed) == []
    assert resumed.state_dict()["epoch"] == 1
    assert len(list(resumed)) == len(loader)


def test_set_epoch_again() -> None:
    """To set the epoch that is resumed changes nothing; another one begins anew."""
    make_loader = make(Numbers(10), 3, sampler=ShuffledIndices(10, 5))
    loader = make(Numbers(10), 3, sampler=ShuffledIndices(10, 5))()
    loader.set_epoch(4)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = numbers(iterator)
    resumed = make(Numbers(10), 3, sampler=ShuffledIndices(10, 5))()
    resumed.load_state_dict(state)
    resumed.set_epoch(4)
    assert numbers(resumed) == rest
    resumed.load_state_dict(state)
    resumed.set_epoch(5)
    loader = make_loader()
    loader.set_epoch(5)
    assert numbers(resumed) == numbers(loader)


def test_an_iteration_under_way_is_left_alone() -> None:
    """A state loaded meanwhile is for the next one, and a warning says so."""
    loader = LOADERS["in order"]()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    next(iterator)
    with pytest.warns(UserWarning, match="takes effect with the next"):
        loader.load_state_dict(state)
    assert numbers(iterator) == [[6, 7, 8], [9]]
    assert numbers(loader) == [[3, 4, 5], [6, 7, 8], [9]]
    assert numbers(loader)[0] == [0, 1, 2]


def test_an_empty_state_is_ignored() -> None:
    """As frameworks save it where there is none."""
    loader = LOADERS["in order"]()
    loader.load_state_dict({})
    assert len(numbers(loader)) == 4


def test_states_are_copies() -> None:
    """What is done to a state changes no loader, and the other way round."""
    loader = LOADERS["in order"]()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    resumed = LOADERS["in order"]()
    resumed.load_state_dict(state)
    state["done"] = 3
    resumed.state_dict()["done"] = 2
    assert numbers(resumed) == numbers(iterator)


def test_a_batch_that_raised() -> None:
    """It counts as delivered once another one is."""
    loader: Any = DataLoader(SyncMap(8), 2, transform=refuse_three)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ValueError, match="three"):
        next(iterator)
    assert loader.state_dict()["done"] == 1
    next(iterator)
    assert loader.state_dict()["done"] == 3
    iterator.close()


def refuse_three(sample: Any) -> Any:
    """Raise for one sample."""
    if sample[1] == 3:
        raise ValueError("three")
    return sample


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_loaded_beside_an_iterator_that_has_not_begun(num_workers: int) -> None:
    """It is for the next one that begins; one with workers has begun with them."""
    loader = DataLoader(range(8), 2, num_workers=num_workers)
    begun = iter(loader)
    next(begun)
    state = loader.state_dict()
    del begun
    loader = DataLoader(range(8), 2, num_workers=num_workers)
    waiting = iter(loader)
    loader.load_state_dict(state)
    found = [batch.tolist() for batch in waiting]
    again = [batch.tolist() for batch in loader]
    if num_workers:  # it had its workers, and their order, from the beginning
        assert found == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert again == [[2, 3], [4, 5], [6, 7]]
    else:
        assert found == [[2, 3], [4, 5], [6, 7]]
        assert again == [[0, 1], [2, 3], [4, 5], [6, 7]]
