"""Reads one MDS shard: the number of samples, their offsets, and the samples.

A sample has its own length, so reading can start at any sample without the offsets.
"""

import struct
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, cast

from aioloader._order.blocks import Bad
from aioloader.datasets._engine import Feed, Steps
from aioloader.datasets._mds.encodings import Decode
from aioloader.errors import DatasetError, TruncatedReadError

_HEAD = struct.Struct("<2I")


class Column(NamedTuple):
    """A column: its name, its decoder, and its size in bytes if that is fixed."""

    name: str
    decode: Decode
    size: int | None


def samples(columns: Sequence[Column], count: int, stop: int, feed: Feed) -> Steps:
    """Yield the samples of a shard.

    A sample that cannot be decoded is one failed sample; damaged lengths end the shard,
    and so do bytes after the last sample.

    Args:
        columns: Columns of its samples.
        count: Number of samples.
        stop: End of the samples: for a whole shard, its length.
        feed: The bytes from the beginning, or from the start of a sample on.
    """
    lengths = struct.Struct(f"<{sum(not one.size for one in columns)}I")
    fixed = sum(one.size or 0 for one in columns)
    at = feed.at
    try:
        if not at:
            at = yield from _read_offsets(count, stop, feed)
        while at < stop:
            head = yield from _read(lengths.size, stop, feed)
            length = lengths.size + fixed + sum(lengths.unpack(head))
            if at + length > stop:
                what = f"a sample of {length:,} bytes, after the shard's end"
                raise _damage(feed.url, at, what)
            body = yield from _read(length - lengths.size, stop, feed)
            sizes = iter(lengths.unpack(head))
            sample = _decode(columns, sizes, body, feed.url, at)
            at += length
            yield [sample], at
        if (yield from feed.read(1)):
            what = "bytes after the last sample that the index lists"
            raise _damage(feed.url, at, what)
    except DatasetError as error:
        yield [Bad(error)], at


def _read_offsets(count: int, stop: int, feed: Feed) -> Generator[None, None, int]:
    """Return where the first sample starts, and go there."""
    head = yield from _read(_HEAD.size, stop, feed)
    found, first = cast("tuple[int, int]", _HEAD.unpack(head))
    if found != count or not 8 + 4 * found <= first <= stop:
        raise _damage(
            feed.url,
            0,
            f"{found:,} samples, the first at {first:,}, where the index has "
            f"{count:,} in {stop:,} bytes",
        )
    yield from _read(first - 8, stop, feed)
    return first


def _read(length: int, stop: int, feed: Feed) -> Generator[None, None, bytes]:
    data = yield from feed.read(length)
    if len(data) < length:
        raise TruncatedReadError(
            f"{feed.url!r} has {feed.at:,} of {stop:,} bytes",
            location=feed.url,
            expected=stop,
            received=feed.at,
        )
    return data


def _decode(
    columns: Sequence[Column], sizes: Any, body: bytes, url: str, start: int
) -> Any:
    at, sample, name = 0, dict[str, Any](), ""
    try:
        for name, decode, size in columns:
            stop = at + (size or next(sizes))
            sample[name] = decode(body[at:stop])
            at = stop
    except Exception as error:  # noqa: BLE001  (of a picture, for example)
        failure = DatasetError(
            f"{url!r}: the sample at byte {start:,} is damaged: column {name!r}: "
            f"{type(error).__name__}: {error}",
            location=url,
        )
        failure.__cause__ = error
        return Bad(failure)
    return sample


def _damage(url: str, at: int, what: str) -> DatasetError:
    return DatasetError(f"{url!r} is damaged at byte {at:,}: {what}", location=url)
