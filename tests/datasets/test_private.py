"""The parts that datasets are made of."""

import asyncio
import gc
import pickle
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.datasets._stores.flights import Flights
from aioloader.datasets._stores.listing import Listing
from aioloader.datasets._stores.names import NameTable

Names = st.lists(
    st.text() | st.binary().map(lambda b: b.decode("utf-8", "surrogateescape"))
)


@given(Names, st.integers(-9, 9), st.slices(8))
def test_names_are_as_a_list(names: list[str], index: int, part: slice) -> None:
    """A table gives what the list gives, by index, slice and iteration."""
    table = NameTable(names)
    assert list(table) == names
    assert table == names
    assert table[part] == names[part]
    if -len(names) <= index < len(names):
        assert table[index] == names[index]
    else:
        with pytest.raises(IndexError):
            table[index]


def test_big_names_travel_out_of_band() -> None:
    """A table gives its two buffers to whoever ships them apart."""
    buffers: list[Any] = []
    table = NameTable(f"{index:040d}" for index in range(1000))
    head = pickle.dumps(table, 5, buffer_callback=buffers.append)
    assert len(head) < 1000
    assert sum(buffer.raw().nbytes for buffer in buffers) == 40_000 + 8_008


def test_listing_leaves_out_folder_markers() -> None:
    """An empty object is a folder's marker only if there are keys below it."""
    found = {"a/x": 1, "a": 0, "a-b": 0, "b": 0, "c": 2, "c/x": 0, "": 0}
    listing = Listing(found)
    assert list(listing) == ["a-b", "a/x", "b", "c", "c/x"]
    assert listing.sizes.tolist() == [0, 1, 0, 2, 0]


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
