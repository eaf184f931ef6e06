"""Shards that change while they are read, or between a state and its resumption."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from aioloader.datasets import (
    Requests,
    TextDataset,
    from_async_iterable,
    from_iterable,
)
from aioloader.datasets._stores.versions import Version
from aioloader.errors import DatasetError, ShardChangedError
from datasets.changing import ChangingServer
from datasets.shards import check_resumes, read

QUICK = Requests(timeout=5.0, deadline=2.0, base_delay=0.001, max_delay=0.01)
AT_ONCE: dict[str, Any] = {"store_options": {"retry_config": {"max_retries": 0}}}
SMALL: dict[str, Any] = {"max_bytes": 1 << 18, "requests": QUICK, **AT_ONCE}


async def rest_of(stream: Any) -> list[Any]:
    async with aiter(stream) as iterator:
        return [sample async for sample in iterator]


def lines(count: int, mark: str = "a") -> bytes:
    """Return lines of text that tell their version, of equal lengths."""
    return b"".join(f"{mark}{at:07} {'x' * 990}\n".encode() for at in range(count))


@pytest.mark.parametrize(
    ("tags", "count", "failures"),
    [
        ("strong", 1500, 0),
        ("weak", 1500, 0),
        ("weak date", 2000, 0),
        ("date", 2000, 0),
        ("", 1500, 0),
        ("", 2500, 0),
        ("strong unconditional", 2000, 0),
        # An answer of another version is no answer to a request that failed before.
        ("", 1900, 2),
        ("date", 1900, 2),
        ("weak", 1900, 2),
    ],
)
async def test_while_it_is_read(tags: str, count: int, failures: int) -> None:
    with ChangingServer(lines(2000), tags=tags) as server:
        async with aiter(TextDataset(f"{server.url}/a", **SMALL)) as iterator:
            await anext(iterator)
            server.fail_next(failures)
            server.replace(lines(count, "b"))
            with pytest.raises(DatasetError, match="changed while being read"):
                [_ async for _ in iterator]


@pytest.mark.parametrize("tags", ["strong", "weak", "weak date", "date", ""])
async def test_what_does_not_change_is_read(tags: str) -> None:
    """A weak tag is no condition: a server must refuse it, as the standard says."""
    with ChangingServer(lines(2000), tags=tags) as server:
        found = await rest_of(TextDataset(f"{server.url}/a", **SMALL))
    assert len(found) == 2000


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "broken", "refused", "changed"])
@pytest.mark.parametrize("tags", ["strong", ""])
async def test_a_server_without_ranges(fault: str, tags: str) -> None:
    body = lines(5000)
    with ChangingServer(body, tags=tags, has_ranges=False) as server:
        if fault in {"broken", "changed"}:
            server.break_off(at=3_000_000, times=2)
        if fault == "refused":
            server.fail_next(3)
        if fault == "changed":
            server.replace_after(lines(4999, "b"), requests=2)
        stream = TextDataset(f"{server.url}/a", **SMALL)
        if fault == "changed":
            with pytest.raises(DatasetError, match="changed while being read"):
                await rest_of(stream)
            return
        await check_resumes(stream, body.decode().splitlines(), [0, 4321])


async def test_a_server_that_always_breaks_off() -> None:
    with ChangingServer(lines(5000), has_ranges=False) as server:
        server.break_off(at=3_000_000, times=10**9)
        policy = Requests(deadline=0.3, base_delay=0.001, max_delay=0.01)
        stream = TextDataset(f"{server.url}/a", requests=policy, **AT_ONCE)
        with pytest.raises(
            DatasetError, match=r"bytes announced|UnexpectedEof|given up"
        ):
            await rest_of(stream)


async def test_a_shard_that_grew_before_it_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(lines(2000))
    stream = TextDataset(str(path))
    _, state = await read(stream, 1500)
    path.write_bytes(lines(2001))
    stream.load_state_dict(state)
    with pytest.raises(
        ShardChangedError, match="had 2,000,000 bytes and has 2,001,000"
    ):
        await rest_of(stream)


async def one_by_one(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


async def same(number: int) -> int:
    return number


ITERABLES: dict[str, Callable[[int], Any]] = {
    "list": lambda count: from_iterable([*range(count)]),
    "generator": lambda count: from_iterable(lambda: iter(range(count))),
    "async generator": lambda count: from_async_iterable(lambda: one_by_one(count)),
    "map": lambda count: from_iterable([*range(count)]).map(same),
    "mix": lambda count: from_iterable([*range(count)]).mix(from_iterable([])),
    "readers": lambda count: from_iterable([*range(count)]).readers(2),
}


@pytest.mark.parametrize("kind", ITERABLES)
async def test_an_iterable_that_shrank_before_it_is_resumed(kind: str) -> None:
    """Its epoch does not just end; at the very end nothing is missing."""
    make = ITERABLES[kind]
    for taken in range(1, 9):
        first, state = await read(make(8), taken)
        stream = make(8)
        stream.load_state_dict(state)
        assert first + await rest_of(stream) == [*range(8)]
        for count in range(taken):
            stream = make(count)
            stream.load_state_dict(state)
            with pytest.raises(ShardChangedError, match="restart the epoch"):
                await rest_of(stream)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (Version(1, '"a"'), Version(1, '"a"'), True),
        (Version(1, '"a"'), Version(2, '"a"'), False),
        (Version(1, '"a"'), Version(1, '"b"'), False),
        (Version(1, '"a"', 1.0), Version(1, '"a"', 2.0), True),
        (Version(1, 'W/"a"'), Version(1, 'W/"a"'), True),
        (Version(1, 'W/"a"', 1.0), Version(1, 'W/"a"', 2.0), False),
        (Version(1, 'W/"a"'), Version(1, 'W/"b"'), False),
        (Version(1, None, 1.0), Version(1, '"b"', 1.0), True),
        (Version(1, None, 1.0), Version(1, '"b"', 2.0), False),
        (Version(1), Version(1, None, 2.0), True),
        (Version(1), Version(2), False),
    ],
)
def test_versions(one: Version, other: Version, is_same: bool) -> None:
    """A strong tag decides; else the tag, the date and the length must agree."""
    assert one.is_of(other) == other.is_of(one) == is_same
    assert one.strong == (None if "W/" in (one.e_tag or "W/") else one.e_tag)
