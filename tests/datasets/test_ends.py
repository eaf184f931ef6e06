"""Where a shard ends: only where its format, its packing or its length shows it."""

import asyncio
import bz2
import functools
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard

from aioloader.datasets import (
    ArrowDataset,
    CSVDataset,
    JSONLinesDataset,
    ObjectDataset,
    ParquetDataset,
    Requests,
    TarDataset,
    TextDataset,
)
from aioloader.datasets.tar import write_index
from aioloader.errors import TruncatedReadError
from datasets.changing import ALWAYS, ChangingServer, Sender
from datasets.shards import bytes_of
from datasets.tar_archives import ZEROS, Member, archive, member

QUICK = Requests(timeout=5.0, deadline=1.0, base_delay=0.001, max_delay=0.01)
LONG = "n" * 150


async def read(stream: Any) -> tuple[list[Any], Exception | None]:
    """Return the samples, and the error that ended them."""
    samples: list[Any] = []
    async with aiter(stream) as iterator:
        try:
            async for sample in iterator:
                samples.append(sample)  # noqa: PERF401  (they stay after an error)
        except Exception as error:  # noqa: BLE001  (it is looked at)
            return samples, error
    return samples, None


def written(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


async def whole_or_cut(make: Any, path: Path, data: bytes, cut: int) -> bool:
    whole, error = await read(make(written(path, data)))
    assert error is None
    found, error = await read(make(written(path, data[:cut])))
    assert found == whole[: len(found)]
    if error is None:
        assert found == whole
        return False
    assert isinstance(error, TruncatedReadError)
    assert error.location == str(path)
    return True


@pytest.mark.parametrize("blocks", [0, 1, 2, 9])
@pytest.mark.parametrize("missing_end", ["error", "warn"])
async def test_the_zeros_at_the_end(
    blocks: int, missing_end: Any, tmp_path: Path
) -> None:
    """One block of them is enough; without any, the last sample may lack members."""
    data = member(b"a.x", b"1") + member(b"b.x", b"2") + bytes(512 * blocks)
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    stream = TarDataset(str(path), missing_end=missing_end)
    if blocks:
        found, error = await read(stream)
        assert [sample["x"] for sample in found] == [b"1", b"2"]
    elif missing_end == "warn":
        with pytest.warns(UserWarning, match=r"a\.tar' stops at byte 2,048"):
            found, error = await read(stream)
        assert len(found) == 2
    else:
        found, error = await read(stream)
        assert len(found) == 1
        assert isinstance(error, TruncatedReadError)
        assert (error.received, error.expected) == (2048, 3072)
        assert "sample 'b' at byte 1,024 is lost" in str(error)
        return
    assert error is None


async def test_resume_at_an_end_that_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(member(b"a.x", b"1") + member(b"b.x", b"2"))
    stream = TarDataset(str(path), missing_end="warn")
    with pytest.warns(UserWarning, match="without the zeros"):
        async with aiter(stream) as iterator:
            await anext(iterator), await anext(iterator)
            state = iterator.state_dict()
    stream.load_state_dict(state)
    with pytest.warns(UserWarning, match="without the zeros"):
        assert await read(stream) == ([], None)


async def test_the_last_part_of_a_cut_tar(tmp_path: Path) -> None:
    """Of the parts of a shard, only the last one has its end."""
    path = tmp_path / "a.tar"
    path.write_bytes(archive([Member(f"{at}.x", b"1") for at in range(6)]))
    await asyncio.to_thread(write_index, path)
    stream = TarDataset(str(path))
    for data in (path.read_bytes(), path.read_bytes()[: 6 * 1024]):
        path.write_bytes(data)
        found = [await read(stream.shard(rank, 3)) for rank in range(3)]
        is_cut = len(data) == 6 * 1024
        assert sum(len(samples) for samples, _ in found) == 6 - is_cut
        errors = [type(error) for _, error in found if error is not None]
        assert errors == [TruncatedReadError] * is_cut


@pytest.mark.slow
async def test_an_arrow_stream_cut_anywhere(tmp_path: Path) -> None:
    """Between two messages too, though the last one may look like the mark."""
    data = bytes_of(pa.table({"a": [1, 2, -1, 0]}), "arrows", 2)
    path = tmp_path / "a.arrow"
    cut = [await whole_or_cut(ArrowDataset, path, data, at) for at in range(len(data))]
    assert all(cut)
    path.write_bytes(data[:-8])
    with pytest.warns(UserWarning, match="has no mark at its end"):
        found, error = await read(ArrowDataset(str(path), missing_end="warn"))
    assert (len(found), error) == (4, None)


TEXT = b"".join(b"line %d %d\n" % (at, at**5) for at in range(200))
PACKS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}
PACKED: dict[str, Any] = {
    "txt": TextDataset,
    "jsonl": JSONLinesDataset,
    "tar": TarDataset,
    "csv": functools.partial(CSVDataset, column_names=["a"]),
}
MAKES = {**PACKED, "arrow": ArrowDataset, "parquet": ParquetDataset}
# Arrow's CSV has no xz.
PAIRS = [(e, p) for e in PACKED for p in PACKS if (e, p) != ("csv", "xz")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "pack"), [pair for pair in PAIRS if pair[0] in {"txt", "csv"}]
)
async def test_packed_lines_cut_anywhere(
    ending: str, pack: str, tmp_path: Path
) -> None:
    """What came before the cut is delivered; of two frames, every byte is needed."""
    data = PACKS[pack](TEXT[:999]) + PACKS[pack](TEXT[999:])
    path = tmp_path / f"a.{ending}.{pack}"
    whole, _ = await read(PACKED[ending](written(path, data)))
    for at in {*range(0, len(data), 29), *range(len(data) - 9, len(data))}:
        path.write_bytes(data[:at])
        if at != len(PACKS[pack](TEXT[:999])):
            found, error = await read(PACKED[ending](str(path)))
            assert isinstance(error, TruncatedReadError)
            assert found == whole[: len(found)]


@pytest.mark.parametrize(("ending", "pack"), PAIRS)
async def test_an_empty_packed_file(ending: str, pack: str, tmp_path: Path) -> None:
    """A packed empty file has bytes; only then is it an empty shard."""
    path, make = tmp_path / f"a.{ending}.{pack}", PACKED[ending]
    found, error = await read(make(written(path, b"")))
    assert (found, type(error)) == ([], TruncatedReadError)
    data = PACKS[pack](ZEROS if ending == "tar" else b"")
    assert await read(make(written(path, data))) == ([], None)


@pytest.mark.parametrize("ending", ["tar", "arrow", "parquet", "txt"])
async def test_an_empty_file(ending: str, tmp_path: Path) -> None:
    found, error = await read(MAKES[ending](written(tmp_path / f"a.{ending}", b"")))
    assert (found, isinstance(error, TruncatedReadError)) == ([], ending != "txt")


def empty(to: Sender, _start: int, _stop: int) -> None:
    to.answer(416 if to.served.has_ranges else 200, b"")


@pytest.mark.slow
@pytest.mark.parametrize("has_ranges", [True, False], ids=["416", "200"])
@pytest.mark.parametrize("ending", ["txt", "tar", "parquet", "csv"])
async def test_an_answer_that_seems_empty(ending: str, *, has_ranges: bool) -> None:
    """It is believed only if a second request says that there are no bytes."""
    options: Any = {"bad": empty, "when": ALWAYS, "has_ranges": has_ranges}
    with ChangingServer(TEXT, **options) as server:
        address = f"{server.url}/a.{ending}"
        found, error = await read(MAKES[ending](address, requests=QUICK))
        assert (found, type(error)) == ([], TruncatedReadError)
        if ending == "txt":
            server.body = b""
            assert await read(TextDataset(address, requests=QUICK)) == ([], None)


async def test_an_object_that_seems_empty() -> None:
    options: Any = {"bad": empty, "when": ALWAYS, "has_ranges": False}
    with ChangingServer(TEXT, **options) as server:
        async with ObjectDataset(server.url, ["a.txt"], requests=QUICK) as objects:
            with pytest.raises(TruncatedReadError, match="gave 0 of 3,"):
                await objects[0]
            server.body = b""
            assert bytes(await objects[0]) == b""
