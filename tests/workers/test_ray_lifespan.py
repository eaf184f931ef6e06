"""``lifespan=`` in Ray's actors; what is the user's is not entered there either."""

from pathlib import Path
from typing import Any

import pytest

from aioloader import DataLoader, RayWorkers
from samples import labels
from workers.ray_cluster import cluster, nothing_is_left
from workers.test_lifespan import LoggedAsyncMap, LoggedMap, lives, on_loop, plain

__all__ = ["cluster", "nothing_is_left"]

pytestmark = [
    pytest.mark.slow,  # an actor imports torch
    pytest.mark.usefixtures("cluster"),
]


class Guarded(LoggedMap):
    """Must not be entered."""

    def __enter__(self) -> Any:
        raise AssertionError("entered")

    def __exit__(self, *_exc: object) -> None:
        raise AssertionError("exited")


@pytest.mark.parametrize(
    ("make", "lifespan"),
    [
        pytest.param(Guarded, plain, marks=pytest.mark.fuzz),
        (LoggedAsyncMap, on_loop),
    ],
)
def test_once_in_each_actor(make: Any, lifespan: Any, tmp_path: Path) -> None:
    """Entered before it reads, and left when it ends."""
    path = tmp_path / "log"
    workers = RayWorkers(1)
    with DataLoader(make(path), 4, workers=workers, lifespan=lifespan) as loader:
        iterator = iter(loader)
        assert labels(list(iterator))[1] == [4, 5, 6, 7]
        iterator.close()
    (events,) = lives(path).values()
    assert events == ["enter", "read", "leave"]


def test_an_error_on_entering(tmp_path: Path) -> None:
    """The iteration's error; no actor is placed again."""

    def refuse(dataset: Any) -> Any:
        dataset.note("enter")
        raise ConnectionRefusedError("no such server")

    path = tmp_path / "log"
    loader = DataLoader(LoggedMap(path), 4, workers=RayWorkers(1), lifespan=refuse)
    with pytest.raises(ConnectionRefusedError, match="no such server") as caught:
        list(loader)
    assert any(
        "stage 'lifespan', entering it" in note for note in caught.value.__notes__
    )
    loader.close()
    assert list(lives(path).values()) == [["enter"]]
