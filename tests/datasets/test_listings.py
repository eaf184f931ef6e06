"""Names and listings of many pages: order, faults, and what many keys take."""

import asyncio
import pickle
import tracemalloc
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.datasets import ObjectDataset, TarDataset
from aioloader.datasets._stores.listing import Listing
from aioloader.datasets._stores.names import NameTable
from aioloader.errors import DatasetError
from beside import beside
from datasets.conftest import QUICK
from datasets.shards import NAMES, names
from datasets.test_places import shards
from object_server import Faults, ObjectServer

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


# Few names that are beginnings of others; an empty one is a folder's marker or a file.
Keys = st.text("a/!", max_size=4)


@given(st.dictionaries(Keys, st.integers(0, 2)), st.lists(st.integers(1, 4)))
@pytest.mark.parametrize("is_ordered", [True, False])
def test_pages_are_as_the_whole(
    is_ordered: bool, found: dict[str, int], lengths: list[int]
) -> None:
    left = sorted(found) if is_ordered else list(found)
    pages = []
    for length in [*lengths, len(left)]:
        pages.append(Listing({key: found[key] for key in left[:length]}))
        del left[:length]
    pages += pages[:1]  # a page that came twice
    whole, joined = Listing(found), Listing.joined(pages)
    assert list(joined.items()) == list(whole.items())
    assert not pages


def many(count: int) -> dict[str, int]:
    return {
        f"train/{number % 1000:03}/{number * 7919 % count:024}.bin": number % 3
        for number in range(count)
    }


def serve(sizes: dict[str, int], objects: Any = None) -> ObjectServer:
    return ObjectServer(
        objects, make=lambda _, start, stop: bytes(stop - start), sizes=sizes
    )


def options(server: ObjectServer) -> dict[str, Any]:
    retries = {"backoff": {"init_backoff": timedelta(milliseconds=1)}}
    return {
        "endpoint": server.url,
        "region": "x",
        "skip_signature": True,
        "retry_config": retries,
    }


@pytest.mark.slow
async def test_many_keys(tmp_path: Path) -> None:
    with serve(many(20_000), shards(tmp_path)) as server:
        bucket, config = f"s3://{server.bucket}", options(server)
        async with await ObjectDataset.discover(
            bucket, prefix="train", store_options=config
        ) as some:
            assert list(some.keys) == sorted(many(20_000))
            assert len(await some[-1]) == many(20_000)[some.keys[-1]]
        assert await beside(
            lambda: ObjectDataset(bucket, prefix="train", store_options=config)
        )
        assert await names(TarDataset(f"{bucket}/*.tar", store_options=config)) == NAMES
        assert server.counts("").requests == 20 + 20 + 21


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["errors", "resets", "truncated", "lying"])
@pytest.mark.parametrize("blocking", [False, True])
async def test_goes_on_after_faults(fault: str, blocking: bool) -> None:
    with serve(many(10_000)) as server:
        server.max_keys = 500
        share: Any = {fault: 0.2}
        server.faults = Faults(seed=1, **share)
        bucket, config = f"s3://{server.bucket}", options(server)
        if blocking:
            found = await beside(lambda: ObjectDataset(bucket, store_options=config))
        else:
            found = await ObjectDataset.discover(bucket, store_options=config)
        assert list(found.keys) == sorted(many(10_000))
        assert server.injected()[fault] > 3
        # Each is one, and costs a request.
        assert 23 < server.counts("").requests < 20 + 3 * server.injected()[fault]


async def test_http_is_asked_once(loopback: Any) -> None:
    """A web server that knows no listing is told from one that fails at once."""
    with pytest.raises(DatasetError, match=r"503 .* pass keys="):
        await ObjectDataset.discover(
            loopback.url("503"), store_options={"retry_config": QUICK}
        )
    assert len(loopback.heads) == 2  # by obstore


async def test_cancelled_amid_the_pages(noise: list[Any]) -> None:
    with serve(many(20_000)) as server:
        server.max_keys = 10
        config = options(server)
        task = asyncio.ensure_future(
            ObjectDataset.discover(f"s3://{server.bucket}", store_options=config)
        )
        await beside(lambda: server.wait_for(lambda: server.counts().requests > 150))
        server.faults = Faults(hangs=1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await beside(lambda: server.wait_for(lambda: not server.counts().in_flight))
        assert 150 < server.counts().requests < 2000


@pytest.mark.slow
@pytest.mark.one_loop
async def test_what_many_keys_take() -> None:
    """Memory holds the names twice at most, in their buffers, for a moment."""
    sizes = many(100_000)
    with serve(sizes) as server:
        bucket, config = f"s3://{server.bucket}", options(server)
        # What every listing takes, and the server.
        await ObjectDataset.discover(bucket, prefix="train/000", store_options=config)
        tracemalloc.start()
        try:
            found = await ObjectDataset.discover(bucket, store_options=config)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert list(found.keys) == sorted(sizes)
    # A key's bytes, its end and its size; and 4 MB for pages under way. As a list of
    # strings, and a dict of their sizes, it would be three times as much.
    assert peak < 2 * sum(len(key) + 16 for key in sizes) + (4 << 20)
