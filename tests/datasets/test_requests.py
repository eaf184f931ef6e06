"""Requests that fail, stall or dawdle: tried again by cause, hedged, given up."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aioloader.datasets import Requests
from aioloader.datasets._stores.fetching import LoopRequests, WholeObject
from aioloader.datasets._stores.requests import RefusedError, Tries
from aioloader.datasets._stores.stores import StoreSource
from aioloader.errors import DatasetError, ObjectNotFoundError
from datasets.changing import ChangingServer

Attempt = Callable[[], Coroutine[Any, Any, Any]]
AT_ONCE = Requests(base_delay=0)


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


async def hang() -> None:
    """Never answer."""
    await asyncio.Event().wait()


async def test_tried_until_it_succeeds() -> None:
    """Whatever the number of failures before."""
    attempt = attempts(*map(failure, range(9)), "data")
    assert await Tries(AT_ONCE).make(attempt, "s3://b/k") == "data"


async def test_refusals_are_raised_at_once() -> None:
    """As the error that they carry, and nothing behind it."""
    refused = RefusedError(ObjectNotFoundError("gone", location="s3://b/k"))
    with pytest.raises(ObjectNotFoundError, match="gone") as caught:
        await Tries(AT_ONCE).make(attempts(refused), "s3://b/k")
    assert caught.value.__suppress_context__


async def test_errors_of_ours_are_not_swallowed() -> None:
    """A defect is no failed read."""
    with pytest.raises(ZeroDivisionError):
        await Tries(AT_ONCE).make(attempts(ZeroDivisionError()), "s3://b/k")


async def test_given_up_at_the_deadline() -> None:
    """The last error, with all attempts, those of the client within each too."""
    policy = Requests(deadline=1e-9)
    with pytest.raises(
        DatasetError, match="failed 1; given up after 1e-09 s, 4 att"
    ) as c:
        await Tries(policy).make(attempts(), "s3://b/k", _twice())
    assert (c.value.attempts, c.value.location) == (4, "s3://b/k")


def _twice() -> DatasetError:
    error = failure(1)
    error.attempts = 4
    return error


async def test_a_stall_counts_as_a_failure() -> None:
    """The request is cancelled, and another one made."""
    calls = itertools.count()
    cancelled: list[int] = []

    async def attempt() -> str:
        number = next(calls)
        if number < 2:
            try:
                await hang()
            except asyncio.CancelledError:
                cancelled.append(number)
                raise
        return "data"

    policy = Requests(timeout=0.01, base_delay=0)
    assert await Tries(policy).make(attempt, "s3://b/k") == "data"
    assert cancelled == [0, 1]


async def test_a_cancellation_is_no_failure() -> None:
    """It goes through, and no other try is made."""
    entered = asyncio.Event()
    calls = 0

    async def attempt() -> None:
        nonlocal calls
        calls += 1
        entered.set()
        await hang()

    task = asyncio.create_task(Tries(AT_ONCE).make(attempt, "s3://b/k"))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls == 1


async def hedging() -> Tries:
    """Return tries that have seen enough to know what is slow."""
    tries = Tries(Requests(hedge=True, base_delay=0))
    for _ in range(20):
        await tries.make(attempts("quick"), "s3://b/k")
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

    assert await tries.make(attempt, "s3://b/k") == "second"
    assert ended.is_set()


async def test_what_may_not_run_twice_is_sent_once() -> None:
    """However long it takes."""
    tries = await hedging()
    calls = itertools.count()

    async def attempt() -> int:
        for _ in range(100):
            await asyncio.sleep(0)
        return next(calls)

    assert await tries.make(attempt, "s3://b/k", may_hedge=False) == 0
    assert next(calls) == 1


async def test_a_response_has_one_reader() -> None:
    """Without ranges the next chunk is not requested twice, or some would be lost."""
    body = b"".join(b"%09d\n" % line for line in range(500_000))
    here = LoopRequests(Requests(hedge=True, base_delay=0))
    for _ in range(20):
        await here.tries.make(attempts("quick"), "http://h/k")
    with ChangingServer(body, has_ranges=False) as server:
        whole = WholeObject(here, StoreSource(server.url, {}), "k")
        found = bytearray()
        while piece := (await whole.read()).data:
            found += piece
        await here.aclose()
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

    assert await tries.make(attempt, "s3://b/k") == "data"
    assert next(calls) == 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"timeout": 0}, "timeout and deadline must be above 0, got 0 and 120"),
        ({"deadline": -1}, "timeout and deadline must be above 0, got 30.0 and -1"),
        ({"base_delay": -1}, "delays must not be negative, got base_delay=-1"),
    ],
)
def test_wrong_policies(options: dict[str, Any], text: str) -> None:
    """They are told at once."""
    with pytest.raises(ValueError, match=text):
        Requests(**options)
