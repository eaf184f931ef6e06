"""MosaicML shards, as the writer of MosaicML Streaming makes them.

A directory has an ``index.json`` that lists its shards. A shard has the number of
samples, their offsets, and the samples. A sample has its own length, so reading can
start at any sample without the offsets.
"""

import itertools
import json
import operator
import pickle
import posixpath
import struct
from collections.abc import Callable, Generator, Sequence
from contextlib import AsyncExitStack
from decimal import Decimal
from functools import lru_cache, partial
from io import BytesIO
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, Unpack, cast

import numpy as np

from aioloader._base.blocks import FailedSample
from aioloader._base.extras import imported
from aioloader.datasets._checks import names_options
from aioloader.datasets._stores.addresses import Address, sealed, sibling
from aioloader.datasets._stores.storage import Storage, read_whole
from aioloader.datasets._stores.unpack import unpacker_of
from aioloader.datasets._streams.edges import Offsets
from aioloader.datasets._streams.engine import (
    ByteFeed,
    ByteFormat,
    ByteFormatSpec,
    ByteReader,
    ShardPart,
    Steps,
    nearest,
    shares,
)
from aioloader.datasets._streams.shards import (
    ShardPosition,
    ShardReader,
    Summary,
    summary_of,
)
from aioloader.datasets.sharded import Addresses, StoredStream, StreamOptions
from aioloader.errors import DatasetError, TruncatedReadError

Decode = Callable[[bytes], Any]
_SCALARS = (
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)
# The codes of dtypes: the bits, one more if signed, two more if floating.
_DTYPES = {
    np.dtype(name).itemsize * 8 + {"u": 0, "i": 1, "f": 2}[name[0]]: name
    for name in _SCALARS
}
_SIDES = ("<u1", "<u2", "<u4", "<u8")
_PIECE = 1 << 20
_INDEX = "index.json"
_HEAD = struct.Struct("<2I")
# A column: its name, its encoding or what decodes it, and its bytes if that is fixed.
Encoded: TypeAlias = tuple[str, str, int | None]
MDSColumn: TypeAlias = tuple[str, Decode, int | None]


def decoder_of(encoding: str, *, allow_unsafe_types: bool) -> Decode:
    """Return the decoder of a column.

    A ValueError if the encoding is unknown, or unsafe and not allowed.
    """
    name, _, config = encoding.partition(":")
    if name == "ndarray":
        return _array_decoder(config)
    if name in _SCALARS:
        return partial(_scalar, np.dtype(name).newbyteorder("<"))
    if name in _PICTURES:
        return _picture_decoder(*_PICTURES[name])
    if name == "pkl":
        if not allow_unsafe_types:
            raise ValueError(
                "encoding 'pkl' runs any code that the file's author wrote; if you "
                "trust them, pass allow_unsafe_types=True"
            )
        return pickle.loads  # noqa: S301  (allowed by name)
    if name not in _PLAIN:
        raise ValueError(
            f"unknown encoding {encoding!r}; write the shards with another"
        )
    return _PLAIN[name]


def _scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    value = np.frombuffer(data, dtype)
    if len(value) != 1:
        raise ValueError(f"{len(data)} bytes for a number of type {dtype.name}")
    return value[0]


def _text(make: Callable[[str], Any], data: bytes) -> Any:
    return make(str(data, "utf-8"))


def _array_decoder(config: str) -> Decode:
    """Return a decoder of arrays; both parts of ``dtype:shape`` are optional."""
    dtype, _, shape = config.partition(":")
    if dtype and dtype not in _SCALARS:
        raise ValueError(f"unknown dtype {dtype!r} of an ndarray")
    sides = tuple(map(int, shape.split(","))) if shape else None
    return partial(_array, dtype or None, sides)


def _array(dtype: str | None, shape: tuple[int, ...] | None, data: bytes) -> Any:
    at = 0
    if dtype is None:
        dtype, at = _DTYPES[data[0]], 1
    if shape is None:
        number, kind = divmod(data[at], 4)
        sides = np.frombuffer(data, _SIDES[kind], number, at + 1)
        shape = tuple(sides.tolist())
        at += 1 + sides.nbytes
    # A copy, because tensors share memory with arrays, and bytes are read-only.
    values = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), offset=at)
    return values.reshape(shape).astype(dtype)


def _list(decode: Decode, start: int, data: bytes) -> list[Any]:
    """Decode a count, the lengths and the parts, starting at ``start``."""
    (count,) = struct.unpack_from("<I", data, start)
    lengths = struct.unpack_from(f"<{count}I", data, start + 4)
    at = start + 4 + 4 * count
    if at + sum(lengths) != len(data):
        raise ValueError(f"a list of {at + sum(lengths):,} bytes in {len(data):,}")
    found = []
    for length in lengths:
        found.append(decode(data[at : at + length]))
        at += length
    return found


def _picture_decoder(name: str, count_at: int | None) -> Decode:
    image = imported("PIL.Image", "pictures", "columns of images need Pillow")
    decode = partial(_raw_picture if name == "pil" else _picture, image)
    return decode if count_at is None else partial(_list, decode, count_at)


def _picture(image: ModuleType, data: bytes) -> Any:
    return image.open(BytesIO(data))


def _raw_picture(image: ModuleType, data: bytes) -> Any:
    """Decode width, height, length of the mode's name, that name, and pixels."""
    width, height, length = struct.unpack_from("<3I", data)
    mode = str(data[12 : 12 + length], "utf-8")
    return image.frombytes(mode, (width, height), data[12 + length :])


# Image encodings, and the offset of the count for lists.
_PICTURES: dict[str, tuple[str, int | None]] = {
    **{name: (name, None) for name in ("pil", "jpeg", "png")},
    **{f"list[{name}]": (name, 4) for name in ("pil", "jpeg", "png")},
    "jpeg_array": ("jpeg", 0),
    "jpegarray": ("jpeg", 0),
}
_PLAIN: dict[str, Decode] = {
    "bytes": bytes,
    "str": partial(_text, str),
    "int": partial(int.from_bytes, byteorder="little", signed=True),
    "str_int": partial(_text, int),
    "str_float": partial(_text, float),
    "str_decimal": partial(_text, Decimal),
    "json": partial(_text, json.loads),
}


class MDSDataset(StoredStream[dict[str, Any]]):
    """Streams samples from MDS shards.

    A sample is a dict of its columns, decoded like MosaicML Streaming: numbers, text,
    bytes, JSON, arrays (copied), and images by Pillow. Plain, gzip and zstandard; a
    plain shard can resume at any sample without reading earlier ones, and is split if
    there are fewer shards than readers.

    Args:
        addresses: Directories with an ``index.json``, as paths, URLs or patterns.
        allow_unsafe_types: Whether columns of pickles are loaded, which runs their
            author's code.
        options: As for ``TarDataset``.

    Raises:
        ValueError: If an argument is wrong.
    """

    @names_options
    def __init__(
        self,
        addresses: Addresses,
        *,
        allow_unsafe_types: bool = False,
        **options: Unpack[StreamOptions],
    ) -> None:
        made_by = partial(MDSFormat, allow_unsafe_types=allow_unsafe_types)
        super().__init__(addresses, made_by, **options)


class MDSShard(NamedTuple):
    """A shard, or the part of one from ``start`` to ``stop``."""

    address: Address
    samples: int  # of the whole shard
    size: int  # length, decompressed, in bytes
    columns: tuple[Encoded, ...]
    start: int  # 0 for a whole shard
    stop: int


class MDSFormat(ByteFormat):
    """Shards that the ``index.json`` of directories list."""

    def __init__(
        self, addresses: Any, storage: Storage, *, allow_unsafe_types: bool
    ) -> None:
        indexes = [_joined(folder, _INDEX) for folder in sealed(addresses)]
        super().__init__(indexes, storage, ByteFormatSpec(partial(samples, (), 0, 0)))
        self._allow_unsafe_types = allow_unsafe_types

    async def shards(
        self, stack: AsyncExitStack, _known: Summary | None = None
    ) -> list[Any]:
        """Return the shards, in the order of the indexes."""
        indexes = await super().shards(stack)
        found: list[MDSShard] = []
        for address in indexes:
            folder = sibling(address, lambda path: path.removesuffix(_INDEX))
            label = self.storage.label(address)
            data = await read_whole(self.storage.open(address, 0, _PIECE))
            try:
                entries = json.loads(data)["shards"]
                found += [_shard(folder, entry) for entry in entries]
            except (ValueError, KeyError, TypeError) as error:
                text = f"{label!r} is no index of MDS shards: {error!r}; write it again"
                raise DatasetError(text, location=label) from error
        if not found:
            raise ValueError(
                f"no shards: the index {self.storage.label(indexes[0])!r} lists none; "
                "pass a directory that MDSWriter has finished"
            )
        for columns in {shard.columns for shard in found}:  # an unknown one fails now
            _decoders(columns, allow_unsafe_types=self._allow_unsafe_types)
        return found

    async def cut(self, shards: Sequence[Any], count: int) -> Sequence[Any]:
        """Return ``count`` parts of the shards, cut at the offsets of samples."""
        found: list[MDSShard] = []
        wanted = shares([shard.size for shard in shards], count)
        for shard, number in zip(shards, wanted, strict=True):
            starts: Sequence[int] = ()
            if number > 1 and not unpacker_of(self.storage.label(shard.address)):
                stop = 4 + 4 * shard.samples
                head = self.storage.open(shard.address, 0, _PIECE, stop=stop)
                offsets = f"<{shard.samples}I"
                starts = struct.unpack_from(offsets, await read_whole(head), 4)
                starts = nearest(starts, shard.size, number)
            found += [
                shard._replace(start=start, stop=stop)
                for start, stop in itertools.pairwise([0, *starts, shard.size])
            ]
        if len(found) < count:
            raise ValueError(
                f"{len(shards)} shards can be cut into {len(found)} parts only, but "
                f"there are {count} readers (ranks x workers, or as `readers` says): "
                "compressed shards cannot be cut; use fewer readers, or smaller shards"
            )
        return found

    async def sizes(self, shards: Sequence[Any], *, must: bool) -> Sequence[int] | None:  # noqa: ARG002  (all are known)
        """Return the number of samples of each shard."""
        return [shard.samples for shard in shards]

    def summary(self, shards: Sequence[Any]) -> Summary:
        """Return the number of shards, their names, and their number of samples."""
        edges = [[shard.start, shard.stop, shard.samples] for shard in shards]
        names = summary_of(shard.address for shard in shards)
        whole = summary_of([json.dumps(edges)])
        return {**names, "samples": whole["names"]}

    def address(self, shard: Any) -> Address:
        """Return the address of a whole shard."""
        address: Address = shard.address
        return address

    def spec(self, shard: Any) -> ByteFormatSpec:
        """Return how samples are made of exactly their bytes."""
        allow = self._allow_unsafe_types
        columns = _decoders(shard.columns, allow_unsafe_types=allow)
        return self._spec._replace(quick=partial(_only, columns, *_layout(columns)))

    async def offsets(self, shard: Any) -> Offsets:
        """Return where samples start, and the last ends, from the shard's head."""
        stop = 8 + 4 * shard.samples
        head = self.storage.open(shard.address, 0, _PIECE, stop=stop)
        table = np.frombuffer(await read_whole(head), "<u4")
        if len(table) != shard.samples + 2 or table[0] != shard.samples:
            label = self.storage.label(shard.address)
            what = f"its head is not that of {shard.samples:,} samples, as in the index"
            raise _damage(label, 0, what)
        return table[1:]

    def open(self, shard: Any, position: ShardPosition, budget: int) -> ShardReader:
        """Return a reader of one shard."""
        # Of a whole shard, all is read: what follows the samples shows that the file is
        # not the one that the index lists.
        stop = None if shard.stop == shard.size else shard.stop
        allow = self._allow_unsafe_types
        columns = _decoders(shard.columns, allow_unsafe_types=allow)
        kind = ByteFormatSpec(partial(samples, columns, shard.samples, shard.stop))
        part = ShardPart(shard.address, shard.start, stop, None)
        return ByteReader(self.storage, part, kind, position, budget)


@lru_cache(maxsize=16)
def _decoders(
    columns: tuple[Encoded, ...], *, allow_unsafe_types: bool
) -> list[MDSColumn]:
    found: list[MDSColumn] = []
    for name, encoding, size in columns:
        try:
            decode = decoder_of(encoding, allow_unsafe_types=allow_unsafe_types)
        except ValueError as error:
            raise ValueError(f"column {name!r}: {error}") from None
        found.append((name, decode, size))
    return found


def _shard(folder: Address, entry: dict[str, Any]) -> MDSShard:
    """Read one entry of an index, if it is of a known format and version."""
    if entry["format"] != "mds" or entry["version"] != 2:
        found = f"format {entry['format']!r}, version {entry['version']!r}"
        raise ValueError(f"a shard has {found}; only 'mds', version 2, is supported")
    packed, raw = entry["zip_data"], entry["raw_data"]
    name = (packed or raw)["basename"]
    if packed and unpacker_of(name) is None:
        raise ValueError(
            f"{name!r} is compressed with {entry['compression']!r}; only gz and zstd "
            "are supported"
        )
    fields = ("column_names", "column_encodings", "column_sizes")
    columns = tuple(zip(*(entry[field] for field in fields), strict=True))
    count, size = operator.index(entry["samples"]), operator.index(raw["bytes"])
    return MDSShard(_joined(folder, name), count, size, columns, 0, size)


def _joined(folder: Address, name: str) -> Address:
    return sibling(folder, lambda path: posixpath.join(path, name))


def samples(
    columns: Sequence[MDSColumn], count: int, stop: int, feed: ByteFeed
) -> Steps:
    """Yield the samples of a shard, which end at ``stop``: of all, the shard's end.

    A sample that cannot be decoded is one failed sample; damaged lengths end the shard,
    and so do bytes after the last sample.
    """
    lengths, fixed = _layout(columns)
    at, ends = feed.at, iter(memoryview(b""))  # a reader that resumes has no table
    try:
        if not at:
            head = yield from _read(_HEAD.size, stop, feed)
            found, first = cast("tuple[int, int]", _HEAD.unpack(head))
            if found != count or not 8 + 4 * found <= first <= stop:
                raise _damage(
                    feed.url,
                    0,
                    f"{found:,} samples, the first at {first:,}, where the index has "
                    f"{count:,} in {stop:,} bytes",
                )
            table = yield from _read(first - 8, stop, feed)
            at, ends = first, iter(memoryview(table)[: 4 * found].cast("I"))
        while at < stop:
            head = yield from _read(lengths.size, stop, feed)
            length = lengths.size + fixed + sum(lengths.unpack(head))
            end = at + length
            listed = next(ends, end)
            if end > stop or end != listed:
                what = f"a sample of {length:,} bytes, after the shard's end"
                if end <= stop:
                    what = (
                        f"a sample to byte {end:,}, which its table ends at {listed:,}"
                    )
                raise _damage(feed.url, at, what)
            body = yield from _read(length - lengths.size, stop, feed)
            sizes = iter(lengths.unpack(head))
            sample = _decode(columns, sizes, body, feed.url, at)
            at = end
            yield [sample], at
        if (yield from feed.take(1)):
            what = "bytes after the last sample that the index lists"
            raise _damage(feed.url, at, what)
    except DatasetError as error:
        yield [FailedSample(error, ends=True)], at


def _layout(columns: Sequence[MDSColumn]) -> tuple[struct.Struct, int]:
    """Return the lengths that a sample starts with, and the bytes of other columns."""
    lengths = struct.Struct(f"<{sum(not size for *_, size in columns)}I")
    return lengths, sum(size or 0 for *_, size in columns)


def _only(
    columns: Sequence[MDSColumn],
    lengths: struct.Struct,
    fixed: int,
    url: str,
    start: int,
    data: memoryview,
) -> Any:
    """Return the sample that has exactly these bytes."""
    length = lengths.size
    if len(data) >= length:
        sizes = lengths.unpack_from(data)
        length += fixed + sum(sizes)
        if length == len(data):
            body = bytes(data[lengths.size :])
            return _decode(columns, iter(sizes), body, url, start)
    end = start + len(data)
    what = f"a sample to byte {start + length:,}, which its table ends at {end:,}"
    return FailedSample(_damage(url, start, what))


def _read(length: int, stop: int, feed: ByteFeed) -> Generator[None, None, bytes]:
    data = yield from feed.take(length)
    if len(data) < length:
        raise TruncatedReadError(
            f"{feed.url!r} has {feed.at:,} of {stop:,} bytes; write or copy it again",
            location=feed.url,
            expected=stop,
            received=feed.at,
        )
    return data


def _decode(
    columns: Sequence[MDSColumn], sizes: Any, body: bytes, url: str, start: int
) -> Any:
    at, sample, name = 0, dict[str, Any](), ""
    try:
        for name, decode, size in columns:
            stop = at + (size or next(sizes))
            sample[name] = decode(body[at:stop])
            at = stop
    except Exception as error:  # noqa: BLE001  (of an image, for example)
        failure = DatasetError(
            f"{url!r}: the sample at byte {start:,} is damaged: column {name!r}: "
            f"{type(error).__name__}: {error}; write it again, or skip it",
            location=url,
        )
        failure.__cause__ = error
        return FailedSample(failure)
    return sample


def _damage(url: str, at: int, what: str) -> DatasetError:
    return DatasetError(
        f"{url!r} is damaged at byte {at:,}: {what}; write it again", location=url
    )
