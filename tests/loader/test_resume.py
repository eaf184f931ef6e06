"""A loader's state: wherever an epoch is left, the rest is identical."""

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
    """Return a function that makes such a loader, with further options."""
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
def test_a_loader_resumes_after_any_batch(name: str) -> None:
    """By ``for``, also when resumed twice in a row, and in the next epoch."""
    assert_resumes_exactly(LOADERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
async def test_async_for_resumes_after_any_batch(name: str) -> None:
    await assert_resumes_exactly_async(LOADERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LOADERS if name.startswith("async")])
async def test_the_callers_loop_resumes_after_any_batch(name: str) -> None:
    """The loop of the consumer also reads."""
    await assert_resumes_exactly_async(lambda: LOADERS[name](loop="caller"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "rest"),
    [
        ({}, THREADS),
        (THREADS, {"prefetch_factor": 4}),
        ({"num_workers": 1, "workers": "thread"}, {"device": "cpu"}),
        ({"device": "cpu"}, {"in_order": False}),
        ({"in_order": False}, {"num_workers": 1}),
    ],
    ids=str,
)
def test_another_loader_resumes(options: dict[str, Any], rest: dict[str, Any]) -> None:
    """The other loader has different workers, windows or devices."""
    name = "generator"
    assert_resumes_exactly(
        lambda: LOADERS[name](**options), resume_in=lambda: LOADERS[name](**rest)
    )


# -- while batches are in flight --------------------------------------------------


class Gated:
    """Numbers, of which some wait for the gate; records the indices that were read."""

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
def test_batches_out_of_order_are_not_repeated(taken: int) -> None:
    """The first batch comes last; those delivered before it count."""
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
    samples = [index for batch in delivered for index in batch]
    assert sorted(samples) == list(range(14))
    assert sorted(again.read) == sorted(samples[2 * taken :])


async def test_tasks_and_threads_get_the_same_state() -> None:
    """Between two batches, in the consumer, another task or another thread."""
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


# -- calls of frameworks ----------------------------------------------------------


def test_setting_the_resumed_epoch_changes_nothing() -> None:
    """Setting another epoch starts that one from its beginning."""
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


def test_a_state_loaded_mid_epoch_is_for_the_next_one() -> None:
    """Loading it warns."""
    loader = LOADERS["in order"]()
    iterator, state = begun(loader)
    next(iterator)
    with pytest.warns(UserWarning, match="takes effect with the next"):
        loader.load_state_dict(state)
    assert listed(iterator) == [[6, 7, 8], [9]]
    assert listed(loader) == [[3, 4, 5], [6, 7, 8], [9]]
    assert listed(loader)[0] == [0, 1, 2]


def test_an_empty_state_is_ignored() -> None:
    """Frameworks save an empty state where there is none."""
    loader = LOADERS["in order"]()
    loader.load_state_dict({})
    assert len(listed(loader)) == 4


def test_states_are_copies() -> None:
    """Changing a state changes no loader, and vice versa."""
    loader = LOADERS["in order"]()
    iterator, state = begun(loader)
    resumed = loaded(LOADERS["in order"](), state)
    state["done"] = 3
    resumed.state_dict()["done"] = 2
    assert listed(resumed) == listed(iterator)


def test_a_failed_batch_counts_after_the_next_one() -> None:
    """Until then, resuming would read it again."""
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
def test_a_loaded_state_is_for_the_next_start(num_workers: int) -> None:
    """An iterator with workers has already started, one without has not."""
    loader = DataLoader(range(8), 2, num_workers=num_workers)
    state = left_at(loader, 1)
    loader = DataLoader(range(8), 2, num_workers=num_workers)
    waiting = iter(loader)
    loader.load_state_dict(state)
    first = listed(waiting)
    second = listed(loader)
    if num_workers:  # it started its workers, and their order, at ``iter``
        assert first == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert second == [[2, 3], [4, 5], [6, 7]]
    else:
        assert first == [[2, 3], [4, 5], [6, 7]]
        assert second == [[0, 1], [2, 3], [4, 5], [6, 7]]


# -- unusual moments and samplers -------------------------------------------------


def flat(batches: Any) -> list[int]:
    """Return the samples of batches of integers."""
    return [int(sample) for batch in batches for sample in batch]


def taken(loader: Any, count: int) -> tuple[list[int], Any, list[int]]:
    """Return the samples of ``count`` batches, the state after them, and the rest."""
    iterator = iter(loader)
    first = flat(next(iterator) for _ in range(count))
    state = saved(loader)
    return first, state, flat(iterator)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shuffled", "generator", "lazy"])
async def test_a_state_saved_during_the_first_step_is_exact(kind: str) -> None:
    """It has the seed and the epoch of the order that is about to be delivered."""

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
def test_a_failed_start_keeps_the_loaded_state(options: Any) -> None:
    """The next iteration resumes."""

    class Shy(list[int]):
        is_ready = False

        def __enter__(self) -> None:
            if not self.is_ready:
                raise OSError("not yet")

        def __exit__(self, *_exc: object) -> None:
            pass

    loader = DataLoader(Shy(range(8)), 2, lifespan=lambda data: data, **options)
    _, state, rest = taken(DataLoader(list(range(8)), 2), 2)
    loader.load_state_dict(state)
    with pytest.raises(OSError, match="not yet"):
        next(iter(loader))
    Shy.is_ready = True
    assert flat(loader) == rest


def test_a_pickled_loader_keeps_its_loaded_state() -> None:
    """The copy resumes."""
    _, state, rest = taken(DataLoader(list(range(8)), 2), 1)
    loader = loaded(DataLoader(list(range(8)), 2), state)
    assert flat(pickle.loads(pickle.dumps(loader))) == rest


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_samplers_draw_as_in_torch(kind: str, num_workers: int) -> None:
    """Custom samplers draw before the base seed."""

    def epochs(cls: Any) -> list[Any]:
        torch.manual_seed(5)
        options: Any = {"sampler": Permuting(), "batch_size": None}
        if kind == "batch_sampler":
            options = {"batch_sampler": Grouped()}
        loader = cls(range(N), num_workers=num_workers, **options)
        return [[torch.as_tensor(batch).tolist() for batch in loader] for _ in range(3)]

    assert epochs(DataLoader) == epochs(torch.utils.data.DataLoader)


def test_a_sampler_that_fails_ends_no_epoch() -> None:
    """The state is that after the last delivered batch."""

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


def test_only_one_of_two_threads_resumes() -> None:
    """The other thread reads the whole next epoch, although both have started."""
    barrier, met = threading.Barrier(2), threading.local()

    class Meeting(list[int]):
        def __getitem__(self, index: Any) -> Any:
            if not hasattr(met, "once"):
                met.once = barrier.wait(20)
            return super().__getitem__(index)

    resumed = DataLoader(Meeting(range(12)), 3)
    resumed.load_state_dict(left_at(DataLoader(range(12), 3), 2))
    with ThreadPoolExecutor(2) as pool:
        epochs = sorted(pool.map(lambda _: flat(resumed), range(2)), key=len)
    assert epochs == [[*range(6, 12)], [*range(12)]]
