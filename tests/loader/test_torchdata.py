"""States as torchdata's StatefulDataLoader has them: what version 0.11 gives."""

import os
from typing import Any

import pytest

from aioloader import DataLoader
from loader.states import REPEATED, left_at, listed, rest_of, saved
from stateful import Counted, Cursors, Kept

Loader: Any = DataLoader  # options are tables here

pytestmark = REPEATED


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
    found = listed(loader)
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


@pytest.mark.parametrize("every", [0, 3, None])
def test_snapshots(every: Any) -> None:
    """Torchdata's argument is accepted; a state is that after each batch anyway."""
    options = {"batch_size": 2, "snapshot_every_n_steps": every}
    state = left_at(Loader(Cursors(), **options), 3)
    assert state["states"][0]["0"]["iterator"]["place"] == 6
    assert rest_of(Loader(Cursors(), **options), state) == [[6, 7], [8, 9]]
