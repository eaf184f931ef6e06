"""Requests that fail, stall or dawdle: tried again by cause, hedged, given up."""

import asyncio
import gc
import itertools
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aioloader.datasets import Requests
from aioloader.datasets._stores.flights import Flights
from aioloader.datasets._stores.requests import (
    Server,
    Tries,
    UnreachableError,
)
from aioloader.datasets._stores.stored import Client, StoredObject
from aioloader.datasets._stores.stores import ObstoreStore
from aioloader.errors import DatasetError
from datasets.changing import ChangingServer

Attempt = Callable[[], Coroutine[Any, Any, Any]]
AT_ONCE = Requests(base_delay=0)
PLACE = Server("s3://b"), "k"


def failure(number: int = 0) -> DatasetError:
    """Return what another try may mend."""
    return DatasetError(f"failed {number}", location="s3://b/k", attempts=2)


def attempts(*outcomes: Any) -> Attempt:
    """Return a function that has these outcomes in turn."""
    turns = iter(outcomes)

    async def attempt() -> Any:
        outcome = next(turns)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return attempt


class FakeDraws:
    """Draw these numbers, whatever the bounds."""

    def __init__(self, draws: list[float]) -> None:
        self._draws = iter(draws)

    def uniform(self, _low: float, _high: float) -> float:
        """Return the next one."""
        return next(self._draws)


async def hang() -> None:
    """Never answer."""
    await asyncio.Event().wait()


async def test_a_timeout_names_the_last_error() -> None:
    """Whether it had its whole time or was cut short."""

    async def attempt() -> None:
        if not calls:
            calls.append(1)
            raise failure(7)
        await hang()

    calls: list[int] = []
    with pytest.raises(DatasetError, match=r"^failed 7; given up after 0\.02 s"):
        await Tries(Requests(deadline=0.02, base_delay=0)).make(attempt, *PLACE)
    calls.clear()
    tries = Tries(Requests(timeout=0.01, base_delay=1e-9, max_delay=1e12))
    tries._rng = FakeDraws([0.0, 1e12])  # type: ignore[assignment]
    words = r"no answer within 0\.01 s; the last error before: failed 7; given up"
    with pytest.raises(DatasetError, match=words) as caught:
        await tries.make(attempt, *PLACE)
    assert str(caught.value.__cause__) == "failed 7"


async def test_a_host_that_always_refused_is_given_up_in_seconds() -> None:
    """One that ever answered keeps the whole deadline."""
    tries = Tries(Requests())
    tries._rng = FakeDraws([6.0, 6.0])  # type: ignore[assignment]
    refusing = Server("s3://b"), "k"
    refused = UnreachableError(failure())
    with pytest.raises(DatasetError, match="given up after 5 s"):
        await tries.make(attempts(refused), *refusing)
    assert await tries.make(attempts("data"), *refusing) == "data"
    waiting = asyncio.create_task(tries.make(attempts(refused), *refusing))
    done, _ = await asyncio.wait([waiting], timeout=0.01)
    assert not done
    waiting.cancel()


async def test_the_first_retry_is_logged_once(caplog: Any) -> None:
    """Per store, not per request."""
    place = Server("s3://c"), "k"
    for _ in range(3):
        await Tries(AT_ONCE).make(attempts(failure(1), failure(2), "data"), *place)
    words = "failed 1; retrying for 120 s (logged once for a store)"
    assert [record.getMessage() for record in caplog.records] == [words]
    assert caplog.records[0].levelname == "WARNING"


async def hedging() -> Tries:
    """Return tries that have seen enough to know what is slow."""
    tries = Tries(Requests(hedge=True, base_delay=0))
    for _ in range(20):
        await tries.make(attempts("quick"), *PLACE)
    return tries


async def test_a_slow_request_is_sent_twice() -> None:
    """The first answer counts, and the other request is cancelled."""
    tries = await hedging()
    calls = itertools.count()
    ended = asyncio.Event()

    async def attempt() -> str:
        if next(calls):
            return "second"
        try:
            await hang()
        finally:
            ended.set()
        return "first"

    assert await tries.make(attempt, *PLACE) == "second"
    assert ended.is_set()


@pytest.mark.slow
async def test_a_response_has_one_reader() -> None:
    """Without ranges the next chunk is not requested twice, or some would be lost."""
    body = b"".join(b"%09d\n" % line for line in range(500_000))
    here = Client(Requests(hedge=True, base_delay=0))
    for _ in range(20):
        await here.tries.make(attempts("quick"), *PLACE)
    with ChangingServer(body, has_ranges=False) as server:
        store = ObstoreStore(server.url, {})
        whole = StoredObject(here, store, "k").stream()
        found = bytearray()
        while piece := (await whole.read()).data:
            found += piece
        await store.drain()
    assert bytes(found) == body
    assert server.requests == 1


async def test_of_two_requests_one_may_fail() -> None:
    """Then the other one's answer counts; if both fail, they are tried again."""
    tries = await hedging()
    calls = itertools.count()
    second = asyncio.Event()

    async def attempt() -> str:
        number = next(calls)
        if number % 2:
            second.set()
            if number < 3:
                raise failure(number)
            return "data"
        await second.wait()
        second.clear()
        raise failure(number)

    assert await tries.make(attempt, *PLACE) == "data"
    assert next(calls) == 4


# -- their end ----------------------------------------------------------------------


async def test_drain_waits_for_requests_in_flight() -> None:
    """What is followed when the drain begins is awaited."""
    flights, request = Flights(), asyncio.get_running_loop().create_future()
    following = asyncio.create_task(flights.follow(request))
    await asyncio.sleep(0)
    draining = asyncio.create_task(flights.drain(60.0))
    await asyncio.sleep(0)
    assert not draining.done()
    request.set_result(7)
    del request
    assert await following == 7
    await draining


async def test_drain_waits_for_what_is_held() -> None:
    """A request that is over but still referred to is one a thread may be busy with."""
    flights, held = Flights(), [asyncio.get_running_loop().create_future()]
    following = asyncio.create_task(flights.follow(held[0]))
    await asyncio.sleep(0)
    following.cancel()
    draining = asyncio.create_task(flights.drain(60.0))
    await asyncio.wait({following})
    await asyncio.sleep(0)
    assert not draining.done()
    held.clear()
    del following
    await draining


async def test_a_request_that_is_kept_keeps_no_frames() -> None:
    """obstore's threads may hold a failed request until the next call of obstore."""

    class Iterator:
        """What the frames that await a request hold."""

    async def read() -> None:
        iterator = Iterator()
        seen.append(weakref.ref(iterator))
        await Flights().follow(held[0])

    seen: list[weakref.ref[Iterator]] = []
    held = [asyncio.get_running_loop().create_future()]
    held[0].set_exception(FileNotFoundError(2, "not there"))
    with pytest.raises(FileNotFoundError, match="not there"):
        await read()
    gc.collect()
    assert seen[0]() is None
