"""Listings of many pages: order, faults, cancellation, and what many keys take."""

import asyncio
import json
import subprocess
import sys
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader.datasets import ObjectDataset, TarDataset
from aioloader.datasets._stores.listing import Listing
from aioloader.errors import DatasetError
from beside import beside
from datasets.shards import NAMES, names
from datasets.test_places import shards
from object_server import Faults, ObjectServer

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
def test_files_in_no_order(tmp_path: Path) -> None:
    """A folder lists as its file system likes; the keys are sorted all the same."""
    written = {f"{name % 7}/{name:04}": b"x" for name in range(2500)}
    for key, body in written.items():
        (tmp_path / key).parent.mkdir(exist_ok=True)
        (tmp_path / key).write_bytes(body)
    assert list(ObjectDataset(tmp_path).keys) == sorted(written)


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
        assert server.counts("").requests < 20 + 3 * server.injected()[fault]


async def test_http_is_asked_once(loopback: Any, quick: Any) -> None:
    """A web server that knows no listing is told from one that fails at once."""
    with pytest.raises(DatasetError, match=r"503 .* pass keys="):
        await ObjectDataset.discover(
            loopback.url("503"), store_options={"retry_config": quick}
        )
    assert len(loopback.heads) == 2  # by obstore


async def test_cancelled_amid_the_pages() -> None:
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


SCRIPT = """
import asyncio, json, sys, zlib
from pathlib import Path
from aioloader.datasets import ObjectDataset

def peak():
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) << 10 for line in lines if "VmHWM" in line)

async def main(url, options):
    # what every listing takes: imports, threads, connections
    await ObjectDataset.discover(url, prefix="train/000", store_options=options)
    before = peak()
    async with await ObjectDataset.discover(url, store_options=options) as found:
        grown, checksum = peak() - before, 0
        for key in found.keys:
            checksum = zlib.crc32(key.encode(), checksum)
        print(json.dumps([len(found), checksum, grown]))

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""


@pytest.mark.slow
def test_what_many_keys_take() -> None:
    """Memory holds the names twice at most, in their buffers, for a moment."""
    sizes = many(300_000)
    with serve(sizes) as server:
        config = options(server)
        del config["retry_config"]
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, f"s3://{server.bucket}", json.dumps(config)],
            capture_output=True,
            text=True,
            check=False,
        )
    assert not done.returncode, done.stderr
    *found, grown = json.loads(done.stdout)
    checksum = 0
    for key in sorted(sizes):
        checksum = zlib.crc32(key.encode(), checksum)
    assert found == [len(sizes), checksum]
    # A key's bytes, its end and its size; and 16 MB for pages under way. As a list of
    # strings, and a dict of their sizes, it would be three times as much.
    assert grown < 2 * sum(len(key) + 16 for key in sizes) + (16 << 20)
