"""States hold the generators: later epochs and random transforms are the same."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from aioloader import DataLoader, merge_states
from loader.states import REPEATED, listed, loaded, saved, seeded
from resuming import assert_resumes_exactly
from samples import collect
from stateful import Plain, mine
from working import Drawing, Numbers

N = 11
DATA: Any = range(N)
Loader: Any = DataLoader  # options are tables here

pytestmark = [
    REPEATED,
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings('ignore:rng="worker". what the:UserWarning'),
]


class Permuting(Sampler[int]):
    """Draws its order from the default generator when it is iterated."""

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(N).tolist())


class OneByOne(Permuting):
    """Draws each index when it is requested."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(N):
            yield int(torch.randint(N, ()))


class Grouped(Sampler[list[int]]):
    """A batch sampler that draws, and has no state."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(N)[:9].view(3, 3).tolist())


class Yielding(Grouped):
    """A generator function: draws at its first step, not at ``iter``."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from torch.randperm(N)[:9].view(3, 3).tolist()


class Noisy(Numbers):
    """Its samples draw from the default generator."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(())


class Itself(Plain):
    """Its own iterator; its state has the position of torch's generator."""

    place = 0

    def __iter__(self) -> Iterator[int]:
        self.place = 0
        return self

    def __next__(self) -> int:
        if self.place >= len(mine(self.n)):
            raise StopIteration
        self.place += 1
        return int(torch.randint(10**6, ()))

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
        torch.set_rng_state(state["torch"])


class Apart(Plain):
    def __iter__(self) -> Iterator[int]:
        return iter(Itself(self.n))


class Mapped(Noisy):
    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])


THREADS = {"num_workers": 2, "workers": "thread", "persistent_workers": True}
PROCESSES = {"num_workers": 2, "persistent_workers": True}
LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled": lambda: {"shuffle": True},
    "in order, draws": lambda: {"dataset": Drawing(N), "rng": "batch"},
    "own draws": lambda: {"dataset": Noisy(N), "shuffle": True},
    "one by one": lambda: {"shuffle": True, "batch_size": None},
    "generator": lambda: {"shuffle": True, "generator": seeded()},
    "weighted": lambda: {"sampler": WeightedRandomSampler([0.1] * N, 13)},
    "subset": lambda: {"sampler": SubsetRandomSampler(DATA[2:])},
    "subset, generator": lambda: {
        "sampler": SubsetRandomSampler(DATA[2:], generator=seeded())
    },
    "replacement": lambda: {"sampler": RandomSampler(DATA, replacement=True)},
    "blocks": lambda: {
        "sampler": RandomSampler(DATA, num_samples=25, generator=seeded())
    },
    "blocks, threads": lambda: {
        "sampler": RandomSampler(DATA, num_samples=25, generator=seeded()),
        **THREADS,
    },
    "sampler draws": lambda: {
        "sampler": WeightedRandomSampler([0.1] * N, 13),
        "generator": seeded(),
    },
    "permuting": lambda: {"sampler": Permuting()},
    "permuting, generator": lambda: {"sampler": Permuting(), "generator": seeded()},
    "permuting, one by one": lambda: {"sampler": Permuting(), "batch_size": None},
    "drawn one by one": lambda: {"sampler": OneByOne()},
    "grouped": lambda: {"batch_sampler": Grouped()},
    "yielding": lambda: {"batch_sampler": Yielding()},
    "yielding, threads": lambda: {"batch_sampler": Yielding(), **THREADS},
    "wrapped": lambda: {"batch_sampler": BatchSampler(Permuting(), 3, drop_last=False)},
    "wrapped, generator, processes": lambda: {
        "batch_sampler": BatchSampler(
            RandomSampler(DATA, generator=seeded()), 3, drop_last=False
        ),
        **PROCESSES,
    },
    "threads": lambda: {"shuffle": True, **THREADS},
    "threads, generator": lambda: {
        "shuffle": True,
        "generator": seeded(),
        "prefetch_factor": 4,
        **THREADS,
    },
    "ahead": lambda: {"shuffle": True, "prefetch_factor": 3},
    "processes": lambda: {"shuffle": True, **PROCESSES},
    "processes, draws": lambda: {
        "shuffle": True,
        "dataset": Drawing(N),
        "num_workers": 1,
    },
    "itself": lambda: {"dataset": Itself()},
    "itself, drawn by batch": lambda: {"dataset": Itself(), "rng": "batch"},
    "itself, workers": lambda: {"dataset": Itself(), "num_workers": 2, "rng": "worker"},
    "apart": lambda: {"dataset": Apart()},
    "mapped": lambda: {"dataset": Mapped(N)},
    "mapped, shuffled": lambda: {"dataset": Mapped(N), "shuffle": True},
}


def make(name: str) -> Any:
    """Return such a loader."""
    options: dict[str, Any] = {"dataset": Numbers(N), **LOADERS[name]()}
    if "batch_sampler" not in options:
        options = {"batch_size": 3, **options}
    return Loader(**options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:rng=.worker.:UserWarning")  # of a state in an epoch
@pytest.mark.parametrize("name", LOADERS)
def test_resuming_repeats_all_random_numbers(name: str) -> None:
    """In the rest of the epoch and in two more, while the steps draw as well."""
    assert_resumes_exactly(lambda: make(name))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("shuffled", "seed"),
        ("generator", "generator"),
        ("subset", "generator"),
        ("permuting", "before"),
    ],
)
def test_resuming_an_order_moves_no_generator(name: str, key: str) -> None:
    """The order is drawn from a copy: of the seed, or of the saved generator."""
    torch.manual_seed(3)
    loader = make(name)
    steps = iter(loader)
    next(steps)
    state = saved(loader)
    drawn = {"seed", "generator", "before"}.intersection(state["order"][0])
    assert drawn == {key}
    rest = listed(steps)
    resumed = loaded(make(name), state)
    generator = resumed.generator or torch.default_generator
    before = generator.get_state()
    steps = iter(resumed)
    batches = [next(steps).tolist()]
    assert torch.equal(generator.get_state(), before)
    assert batches + listed(steps) == rest


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shuffled", "subset, generator", "processes"])
def test_leaving_an_epoch_saves_the_next_one(name: str) -> None:
    """If the next iterator exists by then, the state is that of its epoch."""
    loader = make(name)
    left = iter(loader)
    next(left)
    waiting = iter(loader)  # the position of the first one counts
    assert loader.state_dict()["done"] == 1
    left.close()
    state = loader.state_dict()
    assert (state["epoch"], state["done"]) == (loader.epoch, 0) == (1, 0)
    expected = listed(waiting)
    loader.close()
    torch.manual_seed(99)
    resumed = loaded(make(name), state)
    assert listed(resumed) == expected
    resumed.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["permuting", "subset, generator", "generator"])
async def test_workers_resume_before_the_first_step(name: str) -> None:
    """Workers start at ``aiter``; the order is drawn at the first step."""

    def waiting() -> Any:
        return Loader(**{"dataset": Numbers(N), **LOADERS[name]()}, num_workers=1)

    async def epochs(loader: Any, iterator: Any, count: int) -> Any:
        return [listed(await collect(it)) for it in (iterator, *[loader] * count)]

    loader = waiting()
    iterator = aiter(loader)
    state = loader.state_dict()
    torch.rand(())  # the order is drawn after it
    expected = await epochs(loader, iterator, 1)
    torch.manual_seed(99)
    resumed = loaded(waiting(), state)
    iterator = aiter(resumed)
    torch.rand(())
    assert await epochs(resumed, iterator, 1) == expected
    await loader.aclose()
    await resumed.aclose()


@pytest.mark.slow
def test_unused_persistent_workers_keep_their_seed() -> None:
    """The seed of their random numbers lasts as long as the workers."""
    options = {"persistent_workers": True, "num_workers": 1, "rng": "batch"}
    loader = Loader(Noisy(N), 3, **options)
    iter(loader).close()
    state = loader.state_dict()
    expected = str(list(loader))
    loader.close()
    torch.manual_seed(99)
    resumed = loaded(Loader(Noisy(N), 3, **options), state)
    assert str(list(resumed)) == expected
    resumed.close()


@pytest.mark.parametrize("with_generator", [False, True])
def test_two_loaders_resume_together(with_generator: bool) -> None:
    """One is in the middle of an epoch, the other between two."""

    def pair() -> tuple[Any, Any]:
        torch.manual_seed(99)
        options = {"generator": seeded() if with_generator else None, "shuffle": True}
        return Loader(Numbers(N), 3, **options), Loader(Numbers(8), 3, **options)

    train, val = pair()
    torch.manual_seed(0)
    steps = iter(train)
    next(steps)
    listed(val)  # a validation in the middle of the epoch
    torch.rand(())
    states = train.state_dict(), val.state_dict()
    rest = listed(steps), listed(train), listed(val)
    again = pair()
    for loader, state in zip(again, states, strict=True):
        loader.load_state_dict(state)
    assert (listed(again[0]), listed(again[0]), listed(again[1])) == rest


def test_a_waiting_state_restores_no_old_generator() -> None:
    """Saved again later, the state has the generator's current position."""
    loader, waiting = (Loader(Numbers(N), 3, shuffle=True) for _ in range(2))
    waiting.load_state_dict(waiting.state_dict())
    list(loader)
    states = loader.state_dict(), waiting.state_dict()
    assert states[0]["generators"] == states[1]["generators"]


@pytest.mark.parametrize("restores", ["loader", "user", "seed"])
def test_users_may_restore_the_generator_too(restores: str) -> None:
    """By ``torch.set_rng_state``, before or after the load; a later seed counts."""
    loader = make("shuffled")
    list(loader)
    state, position = loader.state_dict(), torch.get_rng_state()
    if restores == "seed":
        position = torch.manual_seed(5).get_state()
    expected = listed(loader)
    resumed = make("shuffled")
    if restores == "user":
        torch.set_rng_state(position)
    resumed.load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), position) == (restores != "seed")
    if restores != "user":
        torch.set_rng_state(position)
    assert listed(resumed) == expected


def test_with_a_generator_the_default_one_is_not_set() -> None:
    """The loader draws nothing from the default generator."""
    state = make("generator").state_dict()
    before = torch.manual_seed(3).get_state()
    make("generator").load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), before)


def test_merged_ranks_keep_their_different_seeds() -> None:
    """A merged state would give the generator of one rank to all."""
    states = []
    for rank in range(2):
        torch.manual_seed(rank)
        loader = Loader(Numbers(N), 3, shuffle=True, rank=rank, world_size=2)
        states.append(loader.state_dict())
    assert merge_states(states)["generators"] == ()
    assert merge_states(states[:1] * 2)["generators"] == states[0]["generators"]


class Rolled(Numbers):
    """Draws from torch's global generator, which it keeps in its state."""

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(1 << 30, (1,))) + index

    def state_dict(self) -> dict[str, Any]:
        return {"generator": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["generator"])


@pytest.mark.parametrize("options", [{}, {"shuffle": True}], ids=str)
async def test_a_dataset_may_save_the_generator(options: Any) -> None:
    """Random numbers of prefetched batches do not count."""
    async with DataLoader(Rolled(), 2, **options) as loader:
        begin = loader.state_dict()
        whole = listed(await collect(loader))
        loader.load_state_dict(begin)
        iterator = aiter(loader)
        batches = [await anext(iterator) for _ in range(2)]
        del iterator
        loader.load_state_dict(loader.state_dict())
        batches += await collect(loader)
        assert listed(batches) == whole
        loader.load_state_dict(begin)
        assert listed(await collect(loader)) == whole


class ManyAtOnce(Numbers):
    """Async; its state is the number of its reads."""

    reads = 0

    async def __getitem__(self, index: int) -> int:
        self.reads += 1
        return self.reads

    def state_dict(self) -> dict[str, Any]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reads = state["reads"]


async def test_resuming_a_stateful_async_dataset_warns() -> None:
    """The dataset's state counts samples of later batches."""
    loader, resumed = (Loader(ManyAtOnce(12), 2, concurrency=4) for _ in range(2))
    async with loader, resumed:
        async for _ in loader:
            break
        resumed.load_state_dict(loader.state_dict())
        with pytest.warns(UserWarning, match="ManyAtOnce reads many samples at once"):
            assert len([batch async for batch in resumed]) == 5
