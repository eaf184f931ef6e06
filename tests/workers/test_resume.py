"""A loader's state with worker processes does not depend on the workers."""

from collections.abc import Callable
from typing import Any

import pytest

from aioloader import DataLoader, ShuffledIndices
from aioloader.datasets import from_iterable
from loader.states import REPEATED, begun, seeded
from resuming import assert_resumes_exactly, assert_resumes_exactly_async
from samples import AsyncMap, AsyncStream
from stateful import Cursors
from working import AsyncDrawing, Drawing, Numbers, Sharded, draw

Loader: Any = DataLoader  # options are tables here

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning"
)


def drawing(**options: Any) -> DataLoader[Any]:
    """Return a loader that shuffles, and draws for each sample."""
    arguments: dict[str, Any] = {"shuffle": True, "rng": "batch"}
    loader: DataLoader[Any] = Loader(
        Drawing(10), 3, generator=seeded(), **arguments | options
    )
    return loader


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "resumed"),
    [
        ({}, {"num_workers": 3}),
        ({"num_workers": 3}, {"num_workers": 1}),
        pytest.param(
            {"num_workers": 1, "prefetch_factor": 4}, {}, marks=pytest.mark.fuzz
        ),
        ({"num_workers": 3}, {"num_workers": 2, "in_order": False}),
        pytest.param(
            {"num_workers": 2, "persistent_workers": True},
            {"num_workers": 1, "persistent_workers": True},
            marks=pytest.mark.fuzz,
        ),
        ({"num_workers": 2, "persistent_workers": True}, {}),
        ({}, {"num_workers": 1, "persistent_workers": True}),
    ],
    ids=str,
)
def test_other_workers_resume_the_same_epoch(
    options: dict[str, Any], resumed: dict[str, Any]
) -> None:
    """The rest is the same, random draws included."""
    assert_resumes_exactly(
        lambda: drawing(**options), resume_in=lambda: drawing(**resumed), stops=[1, 3]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: Loader(AsyncDrawing(8), 3, num_workers=1),
        lambda: Loader(
            AsyncMap(9), 3, num_workers=2, fetch="loader", transform=draw, rng="sample"
        ),
        lambda: Loader(from_iterable(range(12)).shuffle(5), 3, num_workers=2),
        lambda: Loader(
            Numbers(9),
            3,
            sampler=ShuffledIndices(9, 4),
            num_workers=2,
            persistent_workers=True,
        ),
        lambda: Loader(Numbers(10), 2, num_workers=3, in_order=False),
    ],
    ids=["async", "read by the loader", "stream", "persistent", "any order"],
)
async def test_async_for_resumes_exactly(make: Callable[[], Any]) -> None:
    """Wherever samples are read."""
    await assert_resumes_exactly_async(make, stops=[1])


def test_resuming_generators_of_workers_warns_once() -> None:
    """In mid-epoch; not with seeds for each batch, nor between epochs."""
    loader = drawing(num_workers=1, rng="worker")
    with loader:
        iterator, state = begun(loader)
        list(iterator)
        with pytest.warns(UserWarning, match="draws other random numbers") as said:
            loader.load_state_dict(state)
            list(loader)
        assert [warning.category for warning in said].count(UserWarning) == 1
        loader.load_state_dict(loader.state_dict())
    with drawing(num_workers=1) as loader:
        loader.load_state_dict(state)


@pytest.mark.slow
def test_workers_resume_from_their_own_states() -> None:
    """Without a warning."""
    assert_resumes_exactly(
        lambda: Loader(Cursors(17), 2, num_workers=3), stops=[0, 2, 5]
    )


@pytest.mark.slow
@REPEATED
@pytest.mark.parametrize("in_order", [True, False])
def test_workers_without_states_read_again(in_order: bool) -> None:
    """They may draw."""
    assert_resumes_exactly(
        lambda: Loader(
            Sharded(17), 2, num_workers=2, transform=draw, in_order=in_order
        ),
        stops=[1, 4],
    )


@pytest.mark.slow
@REPEATED
async def test_async_iterables_resume_in_workers() -> None:
    """With ``fetch="workers"`` each worker reads all of it."""
    await assert_resumes_exactly_async(
        lambda: Loader(AsyncStream(7), 2, num_workers=2, fetch="workers"), stops=[3]
    )
