"""The ranged reads behind pyarrow: the right bytes, whatever was planned."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader.datasets._arrow.ranges import Ranges, plan
from aioloader.errors import DatasetError

SIZE = 3000
DATA = bytes(place % 251 for place in range(SIZE))
SPANS = st.lists(
    st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted), max_size=6
)


@contextmanager
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


class Store:
    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []

    async def read(self, start: int, stop: int) -> bytes:
        self.spans.append((start, stop))
        await asyncio.sleep(0)
        return DATA[start:stop]


def apart(spans: list[Any]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(map(tuple, spans)):
        if not found or start >= found[-1][1]:
            found.append((start, stop))
    return found


@settings(max_examples=20)
@given(
    spans=SPANS.map(apart),
    reads=SPANS,
    most=st.integers(50, SIZE),
    budget=st.integers(0, SIZE),
    in_order=st.booleans(),
)
async def test_reads_give_the_bytes(
    spans: Any, reads: Any, most: int, budget: int, in_order: bool
) -> None:
    store = Store()
    ranges = Ranges(
        store.read,
        SIZE,
        plan(spans, most),
        budget=budget,
        location="here",
        in_order=in_order,
    )
    ranges.begin()
    loop = asyncio.get_running_loop()
    with thread() as pool:
        for start, stop in [*reads, *spans, *reads]:
            read = loop.run_in_executor(pool, ranges.read, start, stop)
            assert (
                bytes(memoryview(await asyncio.wait_for(read, 5))) == DATA[start:stop]
            )
    await ranges.aclose()
    assert ranges.is_draining()


def test_a_loop_that_is_gone_is_an_error() -> None:
    ranges = Ranges(Store().read, SIZE, [], budget=10, location="there")

    async def begin() -> None:
        ranges.begin()

    with asyncio.Runner() as runner:
        runner.run(begin())
    with pytest.raises(DatasetError, match="event loop is closed"):
        ranges.read(0, 10)
