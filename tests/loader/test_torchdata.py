"""States as torchdata's StatefulDataLoader has them: what version 0.11 gives."""

import itertools
import json
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from aioloader import DataLoader
from aioloader.datasets import from_iterable
from stateful import Batches, Counted, Cursors, Epochs, Kept, Numbers, Plain, mine

Loader: Any = DataLoader  # options are tables here


pytestmark = [
    pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning"),
]


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "map": lambda: {"dataset": Numbers(), "batch_size": 3},
    "map, whole": lambda: {"dataset": Numbers(), "batch_size": 5},
    "map with a state": lambda: {"dataset": Counted(), "batch_size": 3},
    "batch sampler": lambda: {"dataset": Numbers(), "batch_sampler": Batches()},
    "iterable": lambda: {"dataset": Plain(), "batch_size": 3},
    "dataset": lambda: {"dataset": Kept(12), "batch_size": 3},
    "iterator": lambda: {"dataset": Cursors(), "batch_size": 3},
    "iterator, whole": lambda: {"dataset": Cursors(12), "batch_size": 3},
}


def saved(loader: Any) -> Any:
    """Return a state as a file brings it back."""
    return json.loads(json.dumps(loader.state_dict()))


def rest_of(loader: Any, state: Any) -> list[Any]:
    """Return what is left of an epoch."""
    loader.load_state_dict(state)
    return [batch.tolist() for batch in loader]


def left_at(loader: Any, taken: int) -> Any:
    """Return the state behind some batches, in the loop."""
    iterator = iter(loader)
    for _ in range(taken):
        next(iterator)
    state = saved(loader)
    iterator.close()
    return state


@pytest.mark.parametrize("options", [{}, {"prefetch_factor": 3}], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, "ours"])
def test_behind_the_last_batch(kind: str, options: dict[str, Any]) -> None:
    """Nothing is left, and the next epoch is a whole one: no epoch is trained twice."""

    def make() -> Any:
        if kind == "ours":
            return Loader(from_iterable(range(10)).shuffle(4), 3, **options)
        return Loader(**KINDS[kind](), **options)

    loader, resumed = make(), make()
    state = left_at(loader, 2 if kind == "map, whole" else 4)
    assert rest_of(resumed, state) == []
    assert saved(resumed)["epoch"] == 1
    assert len(list(resumed)) in {2, 4}


@pytest.mark.slow
def test_readers_that_have_ended() -> None:
    """A dataset that begins anew at its end is not read twice in an epoch."""
    state = left_at(Loader(Kept(5), 2, num_workers=2), 2)
    resumed = Loader(Kept(5), 2, num_workers=2)
    assert rest_of(resumed, state) == [[4]]
    state = left_at(Loader(Kept(5), 2, num_workers=2), 3)
    assert rest_of(Loader(Kept(5), 2, num_workers=2), state) == []


# -- map-style datasets with a state -----------------------------------------------


@pytest.mark.slow
def test_copies_of_a_dataset() -> None:
    """Each worker's state is that behind its latest delivered batch."""
    state = left_at(Loader(Counted(), 3, num_workers=2), 3)
    assert state["datasets"][0] == {"0": {"read": 6}, "1": {"read": 3}}
    assert rest_of(Loader(Counted(), 3, num_workers=2), state) == [[409]]
    state = left_at(Loader(Counted(), 3, num_workers=2), 1)
    rest = [[103, 204, 305], [406, 507, 608], [409]]
    assert rest_of(Loader(Counted(), 3, num_workers=2), state) == rest


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_other_copies(num_workers: int) -> None:
    """Other workers get the state of the one that made the last delivered batch."""
    state = left_at(Loader(Counted(), 3, num_workers=2), 3)
    resumed = Loader(Counted(), 3, num_workers=num_workers)
    assert rest_of(resumed, state) == [[709]]


@pytest.mark.parametrize("options", [{}, {"prefetch_factor": 3}], ids=str)
def test_the_loaders_own_dataset(options: dict[str, Any]) -> None:
    """What was read ahead does not count."""
    state = left_at(Loader(Counted(), 3, **options), 2)
    assert state["datasets"][0] == {"loader": {"read": 6}}
    rest = [[706, 807, 908], [1009]]
    assert rest_of(Loader(Counted(), 3, **options), state) == rest


class Mortal(Counted):
    """Its first copy dies once."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark

    def __getitem__(self, index: int) -> int:
        if index == 7 and not os.path.exists(self.mark):  # noqa: PTH110
            os.close(os.open(self.mark, os.O_CREAT))
            os._exit(3)
        return super().__getitem__(index)


def test_a_copy_that_dies(tmp_path: Any) -> None:
    """Its successor goes on in the state that the dead one's was in."""
    loader = Loader(Mortal(str(tmp_path / "dead")), 3, num_workers=2)
    found = [batch.tolist() for batch in loader]
    assert found == [[100, 201, 302], [103, 204, 305], [406, 507, 608], [409]]


class Refusing(Counted):
    """Its state cannot be told."""

    def state_dict(self) -> dict[str, int]:
        if self.read:
            raise ValueError("not now")
        return {}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_that_fails(num_workers: int) -> None:
    """The user's error is raised, and says where."""
    options = {"num_workers": num_workers} if num_workers else {"prefetch_factor": 2}
    with pytest.raises(ValueError, match="not now") as caught:
        next(iter(Loader(Refusing(), 3, **options)))
    assert any("state_dict()" in note for note in caught.value.__notes__)


# -- iterables ---------------------------------------------------------------------


class Random(Plain):
    """Draws, and its state is that of torch's generator."""

    def __iter__(self) -> Iterator[int]:
        self.place = 0
        while self.place < self.n:
            self.place += 1
            yield int(torch.randint(10**6, ()))

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"rng": "batch"}, {"num_workers": 1}, {"num_workers": 1, "rng": "worker"}],
    ids=str,
)
def test_generators_that_a_dataset_restores(options: dict[str, Any]) -> None:
    """The first batch is drawn as it would have been."""
    torch.manual_seed(0)
    loader = Loader(Random(), 2, **options)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    following = next(iterator).tolist()
    iterator.close()
    torch.manual_seed(1)
    resumed = iter(Loader(Random(), 2, **options))
    resumed.close()
    again = Loader(Random(), 2, **options)
    again.load_state_dict(state)
    iterator = iter(again)
    assert next(iterator).tolist() == following
    iterator.close()


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_before_the_first_batch(num_workers: int) -> None:
    """The dataset's own state is kept: of each reader, until it has delivered."""
    dataset = Kept(12)
    dataset.place = 2
    loader = Loader(dataset, 3, num_workers=num_workers)
    whole = [[2, 3, 4], [5, 6, 7], [8, 9, 10], [11]]
    if num_workers:
        whole = [[4, 6, 8], [5, 7, 9], [10], [11]]
    state = saved(loader)
    assert rest_of(Loader(Kept(12), 3, num_workers=num_workers), state) == whole
    state = left_at(loader, 1)
    assert rest_of(Loader(Kept(12), 3, num_workers=num_workers), state) == whole[1:]


def test_epochs_are_counted_once() -> None:
    """Torchdata iterates such a dataset once more, and so counts its epochs twice."""
    loader = Loader(Epochs(), 5)
    first = [batch.tolist() for batch in loader]
    assert first[0][0] == 100
    resumed = Loader(Epochs(), 5)
    assert rest_of(resumed, saved(loader))[0][0] == 200
    assert rest_of(Loader(Epochs(), 5), saved(Loader(Epochs(), 5))) == first


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 3, None])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_snapshots(every: Any, num_workers: int) -> None:
    """Torchdata's argument is accepted; a state is that after each batch anyway."""
    options = {"num_workers": num_workers, "snapshot_every_n_steps": every}
    state = left_at(Loader(Cursors(), 2, **options), 3)
    places = [one["iterator"]["place"] for one in state["states"][0].values()]
    assert places == ([4, 2] if num_workers else [6])
    whole = [[0, 2], [1, 3], [4, 6], [5, 7], [8], [9]]
    expected = whole[3:] if num_workers else [[6, 7], [8, 9]]
    assert rest_of(Loader(Cursors(), 2, **options), state) == expected


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_sampler_behind_its_epoch(num_workers: int) -> None:
    """It begins the next one."""
    options: Any = {"num_workers": num_workers}
    loader = Loader(Numbers(), batch_sampler=Batches(), **options)
    list(loader)
    state = saved(loader)
    resumed = Loader(Numbers(), batch_sampler=Batches(), **options)
    assert rest_of(resumed, state) == [batch.tolist() for batch in loader]


# -- torch's generator in a state ----------------------------------------------------


class Itself(Plain):
    """Its own iterator; draws, and its state has the position of torch's generator."""

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
    """The iterator has that state."""

    def __iter__(self) -> Iterator[int]:
        return iter(Itself(self.n))


class Mapped(Numbers):
    """Map-style with that state."""

    def __getitem__(self, index: int) -> int:
        return 100 * int(torch.randint(10**6, ())) + index

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])


DRAWING: dict[str, Callable[[], dict[str, Any]]] = {
    "itself": lambda: {"dataset": Itself()},
    "apart": lambda: {"dataset": Apart()},
    "map": lambda: {"dataset": Mapped()},
    "map, shuffled": lambda: {"dataset": Mapped(), "shuffle": True},
    "shuffled": lambda: {"dataset": Numbers(), "shuffle": True},
}


def run_of(iterator: Any, taken: int | None = None) -> list[Any]:
    """Return batches; each step draws."""
    found = []
    for batch in itertools.islice(iterator, taken):
        found += [batch.tolist(), torch.rand(()).item()]
    return found


@pytest.mark.parametrize("moment", ["before", "iter", 1, 2, "end"])
@pytest.mark.parametrize("kind", DRAWING)
def test_draws_of_datasets_and_steps(kind: str, moment: Any) -> None:
    """They go on where they were."""
    torch.manual_seed(5)
    loader = Loader(**DRAWING[kind](), batch_size=3)
    if moment == "end":
        run_of(loader)
    iterator = iter(loader) if moment in {"iter", 1, 2} else None
    if isinstance(moment, int):
        run_of(iterator, moment)
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    expected = [run_of(loader if iterator is None else iterator), run_of(loader)]
    torch.manual_seed(99)
    resumed = Loader(**DRAWING[kind](), batch_size=3)
    resumed.load_state_dict(state)
    assert [run_of(resumed), run_of(resumed)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "iter", 1, "end"])
@pytest.mark.parametrize("kind", ["itself", "shuffled"])
def test_draws_in_workers(kind: str, moment: Any) -> None:
    """A reader that has delivered nothing starts as it did."""
    options = {"batch_size": 3, "num_workers": 2, "rng": "worker"}
    torch.manual_seed(5)
    loader = Loader(**DRAWING[kind](), **options)
    if moment == "end":
        run_of(loader)
    iterator = iter(loader) if moment in {"iter", 1} else None
    if moment == 1 and iterator is not None:
        next(iterator)
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    expected = run_of(loader if iterator is None else iterator)
    torch.manual_seed(99)
    resumed = Loader(**DRAWING[kind](), **options)
    resumed.load_state_dict(state)
    assert run_of(resumed) == expected
