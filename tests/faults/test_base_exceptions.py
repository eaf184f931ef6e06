"""User code in workers that raises what ``except Exception`` does not catch."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from aioloader import DataLoader
from aioloader.errors import WorkerDiedError

T = TypeVar("T")


class OwnError(BaseException):
    """As test frameworks and async libraries have some."""


class Numbers:
    """Samples that are their indices."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


class Raising(Numbers):
    """Sample 5 raises."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        self.error = error

    def __getitem__(self, index: int) -> int:
        return self.check(index)

    def check(self, value: T) -> T:
        """Return ``value``, unless it is sample 5, or a batch of it."""
        if value == 5 or (isinstance(value, list) and 5 in value):
            raise self.error()
        return value


class RaisingAsync(Raising):
    """The same, in a coroutine."""

    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        await asyncio.sleep(0)
        return self.check(index)

    async def check_async(self, value: T) -> T:
        """Return ``value``, unless it is sample 5, or a batch of it."""
        return self.check(value)


def made(where: str, error: Callable[[], BaseException]) -> DataLoader[Any]:
    """Return a loader whose second batch meets ``error``."""
    one = RaisingAsync(error)
    options: dict[str, dict[str, Any]] = {
        "read": {"dataset": Raising(error)},
        "transform": {"transform": one.check},
        "collate": {"collate_fn": one.check},
        "async read": {"dataset": one, "fetch": "workers"},
        "async transform": {"transform": one.check_async},
        "async collate": {"collate_fn": one.check_async},
    }
    chosen: dict[str, Any] = {"dataset": Numbers(), **options[where]}
    return DataLoader(batch_size=4, num_workers=1, **chosen)


WHERE = ["read", "transform", "collate"]
ASYNC = [f"async {where}" for where in WHERE]


@pytest.mark.parametrize("where", [*WHERE, *ASYNC])
def test_a_cancelled_error_is_that_batch_s_error(where: str) -> None:
    """It neither ends the worker nor cancels the consumer; the others arrive."""
    with made(where, asyncio.CancelledError) as loader:
        iterator = iter(loader)
        assert list(next(iterator)) == [0, 1, 2, 3]
        with pytest.raises(RuntimeError, match="raised CancelledError") as caught:
            next(iterator)
        assert not isinstance(caught.value, WorkerDiedError)
        assert list(next(iterator)) == [8, 9, 10, 11]
        with pytest.raises(StopIteration):
            next(iterator)


@pytest.mark.parametrize("where", [*WHERE, *ASYNC])
def test_another_base_exception_is_that_batch_s_error(where: str) -> None:
    """Of its type."""
    with made(where, OwnError) as loader:
        iterator = iter(loader)
        assert list(next(iterator)) == [0, 1, 2, 3]
        with pytest.raises(OwnError):
            next(iterator)
        assert list(next(iterator)) == [8, 9, 10, 11]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("where", [*WHERE, *ASYNC])
def test_exits_and_interrupts_end_the_worker(
    where: str, error: type[BaseException]
) -> None:
    """As they end torch's: the consumer gets its words, and never the exit itself."""
    with made(where, error) as loader:
        iterator = iter(loader)
        assert list(next(iterator)) == [0, 1, 2, 3]
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            next(iterator)
