"""A loader's state: wherever an epoch is left, the rest is the same in every bit."""

import asyncio
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import Sampler, TensorDataset

from aioloader import DataLoader, ShuffledIndices
from beside import beside
from loader.states import begun, left_at, listed, loaded, saved, seeded
from loader.test_resume_draws import Grouped, N, Permuting
from resuming import assert_resumes_exactly, assert_resumes_exactly_async
from samples import AsyncBatchMap, AsyncMap, SyncMap
from working import Drawing, Numbers, draw, draw_own

Loader: Any = DataLoader  # options are tables here
THREADS: dict[str, Any] = {"num_workers": 3, "workers": "thread"}
Make = Callable[..., DataLoader[Any]]


def make(dataset: Any, *arguments: Any, **options: Any) -> Make:
    """Return what makes such a loader; more options change it."""
    return lambda **more: Loader(dataset, *arguments, **options, **more)


LOADERS: dict[str, Make] = {
    "in order": make(Numbers(10), 3),
    "shuffled": make(Numbers(10), 3, shuffle=True),
    "generator": lambda **more: DataLoader(
        Numbers(10), 3, shuffle=True, drop_last=True, generator=seeded(), **more
    ),
    "list": make([*range(10)], 3, shuffle=True),
    "single": make(Numbers(5), None, shuffle=True),
    "tensors": make(TensorDataset(torch.arange(10)), 3, shuffle=True),
    "draws by batch": make(Drawing(10), 3, shuffle=True, rng="batch"),
    "draws by sample": make(Numbers(10), 3, transform=draw, rng="sample"),
    "moved": make(Drawing(10), 3, shuffle=True, rng="batch", device="cpu"),
    "ahead": make(Numbers(10), 3, shuffle=True, prefetch_factor=4),
    "threads": make(Numbers(10), 3, shuffle=True, transform=draw_own, **THREADS),
    "thread": make(
        AsyncMap(10), 3, transform=draw_own, num_workers=1, workers="thread"
    ),
    "async": make(AsyncMap(10), 3, shuffle=True),
    "async, one by one": make(AsyncMap(7), 2, shuffle=True, concurrency=1),
    "async batches": make(AsyncBatchMap(10), 3, shuffle=True),
    "async draws": make(AsyncMap(10), 3, transform=draw, rng="batch"),
    "any order": make(AsyncMap(10), 2, shuffle=True, in_order=False),
    "threads, any order": make(Numbers(10), 2, in_order=False, **THREADS),
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
        ({}, THREADS),
        (THREADS, {"prefetch_factor": 4}),
        ({"num_workers": 1, "workers": "thread"}, {"device": "cpu"}),
        ({"device": "cpu"}, {"in_order": False}),
        ({"in_order": False}, {"num_workers": 1}),
    ],
    ids=str,
)
def test_other_places(options: dict[str, Any], others: dict[str, Any]) -> None:
    """What delivers the rest may be another kind of loader."""
    name = "generator"
    assert_resumes_exactly(
        lambda: LOADERS[name](**options), resume_in=lambda: LOADERS[name](**others)
    )


# -- while batches are ready ------------------------------------------------------


class Gated:
    """Numbers; some wait until they are let go, and it is seen what was read."""

    def __init__(self, n: int, closed: set[int] | None = None) -> None:
        self.n = n
        self.closed = closed or set()
        self.gate = threading.Event()
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if index in self.closed:
            assert self.gate.wait(10)
        self.read.append(index)
        return index


@pytest.mark.parametrize("taken", range(1, 7))
def test_out_of_order(taken: int) -> None:
    """The first batch comes last: what was delivered before it is not read again."""
    dataset = Gated(14, closed={0})
    options: dict[str, Any] = {"batch_size": 2, "in_order": False, **THREADS}
    options["num_workers"] = 2
    loader: Any = DataLoader(dataset, **options)
    iterator = iter(loader)
    delivered = [next(iterator).tolist() for _ in range(taken)]
    state = saved(loader)
    assert state["done"] == 0
    assert state["beyond"] == sorted(first // 2 for first, _ in delivered)
    dataset.gate.set()
    iterator.close()
    again = Gated(14)
    resumed = loaded(DataLoader(again, **options | {"num_workers": 1}), state)
    delivered += listed(resumed)
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


def test_set_epoch_again() -> None:
    """To set the epoch that is resumed changes nothing; another one begins anew."""
    make_loader = make(Numbers(10), 3, sampler=ShuffledIndices(10, 5))
    loader = make_loader()
    loader.set_epoch(4)
    iterator, state = begun(loader)
    rest = listed(iterator)
    resumed = loaded(make_loader(), state)
    resumed.set_epoch(4)
    assert listed(resumed) == rest
    resumed.load_state_dict(state)
    resumed.set_epoch(5)
    loader = make_loader()
    loader.set_epoch(5)
    assert listed(resumed) == listed(loader)


def test_an_iteration_under_way_is_left_alone() -> None:
    """A state loaded meanwhile is for the next one, and a warning says so."""
    loader = LOADERS["in order"]()
    iterator, state = begun(loader)
    next(iterator)
    with pytest.warns(UserWarning, match="takes effect with the next"):
        loader.load_state_dict(state)
    assert listed(iterator) == [[6, 7, 8], [9]]
    assert listed(loader) == [[3, 4, 5], [6, 7, 8], [9]]
    assert listed(loader)[0] == [0, 1, 2]


def test_an_empty_state_is_ignored() -> None:
    """As frameworks save it where there is none."""
    loader = LOADERS["in order"]()
    loader.load_state_dict({})
    assert len(listed(loader)) == 4


def test_states_are_copies() -> None:
    """What is done to a state changes no loader, and the other way round."""
    loader = LOADERS["in order"]()
    iterator, state = begun(loader)
    resumed = loaded(LOADERS["in order"](), state)
    state["done"] = 3
    resumed.state_dict()["done"] = 2
    assert listed(resumed) == listed(iterator)


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
    state = left_at(loader, 1)
    loader = DataLoader(range(8), 2, num_workers=num_workers)
    waiting = iter(loader)
    loader.load_state_dict(state)
    found = listed(waiting)
    again = listed(loader)
    if num_workers:  # it had its workers, and their order, from the beginning
        assert found == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert again == [[2, 3], [4, 5], [6, 7]]
    else:
        assert found == [[2, 3], [4, 5], [6, 7]]
        assert again == [[0, 1], [2, 3], [4, 5], [6, 7]]


# -- moments and samplers that a review found ------------------------------------


def flat(batches: Any) -> list[int]:
    """Return the samples of batches of integers."""
    return [int(sample) for batch in batches for sample in batch]


def taken(loader: Any, count: int) -> tuple[list[int], Any, list[int]]:
    """Return the first batches, the state behind them, and the rest."""
    iterator = iter(loader)
    first = flat(next(iterator) for _ in range(count))
    state = saved(loader)
    return first, state, flat(iterator)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shuffled", "generator", "lazy"])
async def test_a_state_during_the_first_step(kind: str) -> None:
    """Its seed and its epoch are those of the order that is about to be delivered."""

    def make(num_workers: int = 0) -> Any:
        options: Any = {"shuffle": True, "num_workers": num_workers}
        if kind == "generator":
            options["generator"] = torch.Generator().manual_seed(3)
        if kind == "lazy":
            options = {"sampler": ShuffledIndices(12), "num_workers": num_workers}
        return DataLoader(list(range(12)), 4, **options)

    loader = make(num_workers=1)
    async for _ in loader:
        pass
    iterator = aiter(loader)
    step = asyncio.ensure_future(anext(iterator))
    states: list[Any] = []
    while not step.done():
        if (state := saved(loader)) not in states:
            states.append(state)
        await asyncio.sleep(0)
    whole = flat([await step]) + flat([batch async for batch in iterator])
    for state in states:
        assert flat(loaded(make(), state)) == whole


@pytest.mark.parametrize("options", [{}, {"prefetch_factor": 2}], ids=str)
def test_a_start_that_fails_loses_nothing(options: Any) -> None:
    """The loaded state, and the epoch, are there for another try."""

    class Shy(list[int]):
        is_ready = False

        def __enter__(self) -> None:
            if not self.is_ready:
                raise OSError("not yet")

        def __exit__(self, *_exc: object) -> None:
            pass

    loader = DataLoader(Shy(range(8)), 2, lifespan=lambda one: one, **options)
    _, state, rest = taken(DataLoader(list(range(8)), 2), 2)
    loader.load_state_dict(state)
    with pytest.raises(OSError, match="not yet"):
        next(iter(loader))
    Shy.is_ready = True
    assert flat(loader) == rest


def test_a_pickled_loader_keeps_what_was_loaded() -> None:
    """It is a part of what the loader is about to do."""
    _, state, rest = taken(DataLoader(list(range(8)), 2), 1)
    loader = loaded(DataLoader(list(range(8)), 2), state)
    assert flat(pickle.loads(pickle.dumps(loader))) == rest


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_draws_of_a_plain_iter(kind: str, num_workers: int) -> None:
    """They come before the base seed, as torch's."""

    def epochs(cls: Any) -> list[Any]:
        torch.manual_seed(5)
        options: Any = {"sampler": Permuting(), "batch_size": None}
        if kind == "batch_sampler":
            options = {"batch_sampler": Grouped()}
        loader = cls(range(N), num_workers=num_workers, **options)
        return [[torch.as_tensor(one).tolist() for one in loader] for _ in range(3)]

    assert epochs(DataLoader) == epochs(torch.utils.data.DataLoader)


def test_a_sampler_that_fails_ends_no_epoch() -> None:
    """What was not delivered is not over."""

    def failing() -> Iterator[int]:
        yield from range(4)
        raise ValueError("no more")

    class Failing(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return failing()

    several: list[Any] = [{}, {"prefetch_factor": 2}]
    for options in several:
        loader: Any = DataLoader(list(range(8)), 2, sampler=Failing(), **options)
        iterator = iter(loader)
        with pytest.raises(ValueError, match="no more"):
            flat(next(iterator) for _ in range(9))
        assert next(iterator, None) is None
        assert (loader.state_dict()["epoch"], loader.state_dict()["done"]) == (0, 2)


def test_one_of_two_threads_resumes() -> None:
    """The other one reads the whole next epoch, though both have started."""
    barrier, met = threading.Barrier(2), threading.local()

    class Meeting(list[int]):
        def __getitem__(self, index: Any) -> Any:
            if not hasattr(met, "once"):
                met.once = barrier.wait(20)
            return super().__getitem__(index)

    resumed = DataLoader(Meeting(range(12)), 3)
    resumed.load_state_dict(left_at(DataLoader(range(12), 3), 2))
    with ThreadPoolExecutor(2) as pool:
        found = sorted(pool.map(lambda _: flat(resumed), range(2)), key=len)
    assert found == [[*range(6, 12)], [*range(12)]]
