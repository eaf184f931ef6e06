"""Streams of shards in the MDS format of MosaicML Streaming.

The ``index.json`` of a directory lists its shards. A shard consists of the number of
samples, their offsets, and the samples. Each sample starts with the lengths of columns
without a fixed size, so reading can start at any sample without the offsets.
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
# Dtypes by code, which is the number of bits, plus 1 if signed, or 2 if floating.
_DTYPES = {
    np.dtype(name).itemsize * 8 + {"u": 0, "i": 1, "f": 2}[name[0]]: name
    for name in _SCALARS
}
_LENGTH_DTYPES = ("<u1", "<u2", "<u4", "<u8")
_READ_BYTES = 1 << 20
_INDEX = "index.json"
_SHARD_HEAD = struct.Struct("<2I")
# A column's name, encoding or decoder, and size in bytes (None if it varies).
Encoded: TypeAlias = tuple[str, str, int | None]
MDSColumn: TypeAlias = tuple[str, Decode, int | None]


def decoder_of(encoding: str, *, allow_unsafe_types: bool) -> Decode:
    """Return a decoder; raise a ValueError for an unknown or disallowed encoding."""
    name, _, config = encoding.partition(":")
    if name == "ndarray":
        return _array_decoder(config)
    if name in _SCALARS:
        return partial(_scalar, np.dtype(name).newbyteorder("<"))
    if name in _IMAGES:
        return _image_decoder(*_IMAGES[name])
    if name == "pkl":
        if not allow_unsafe_types:
            raise ValueError(
                "encoding 'pkl' runs any code that the file's author wrote; if you "
                "trust them, pass allow_unsafe_types=True"
            )
        return pickle.loads  # noqa: S301  (allowed by name)
    if name not in _DECODERS:
        raise ValueError(
            f"unknown encoding {encoding!r}; write the shards with another"
        )
    return _DECODERS[name]


def _scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    value = np.frombuffer(data, dtype)
    if len(value) != 1:
        raise ValueError(f"{len(data)} bytes for a number of type {dtype.name}")
    return value[0]


def _text(make: Callable[[str], Any], data: bytes) -> Any:
    return make(str(data, "utf-8"))


def _array_decoder(config: str) -> Decode:
    """Return a decoder of arrays; ``config`` is ``dtype:shape``, both optional."""
    dtype, _, shape = config.partition(":")
    if dtype and dtype not in _SCALARS:
        raise ValueError(f"unknown dtype {dtype!r} of an ndarray")
    sizes = tuple(map(int, shape.split(","))) if shape else None
    return partial(_array, dtype or None, sizes)


def _array(dtype: str | None, shape: tuple[int, ...] | None, data: bytes) -> Any:
    offset = 0
    if dtype is None:
        dtype, offset = _DTYPES[data[0]], 1
    if shape is None:
        number, kind = divmod(data[offset], 4)
        sizes = np.frombuffer(data, _LENGTH_DTYPES[kind], number, offset + 1)
        shape = tuple(sizes.tolist())
        offset += 1 + sizes.nbytes
    # Copied, because bytes are read-only and tensors share memory with arrays.
    values = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), offset=offset)
    return values.reshape(shape).astype(dtype)


def _list(decode: Decode, start: int, data: bytes) -> list[Any]:
    """Decode a list, whose count, lengths and values begin at byte ``start``."""
    (count,) = struct.unpack_from("<I", data, start)
    lengths = struct.unpack_from(f"<{count}I", data, start + 4)
    offset = start + 4 + 4 * count
    if offset + sum(lengths) != len(data):
        raise ValueError(f"a list of {offset + sum(lengths):,} bytes in {len(data):,}")
    values = []
    for length in lengths:
        values.append(decode(data[offset : offset + length]))
        offset += length
    return values


def _image_decoder(name: str, count_at: int | None) -> Decode:
    image = imported("PIL.Image", "pictures", "columns of images need Pillow")
    decode = partial(_raw_image if name == "pil" else _image, image)
    return decode if count_at is None else partial(_list, decode, count_at)


def _image(image: ModuleType, data: bytes) -> Any:
    return image.open(BytesIO(data))


def _raw_image(image: ModuleType, data: bytes) -> Any:
    """Decode a raw image: its width, height, length of mode, mode, and pixels."""
    width, height, length = struct.unpack_from("<3I", data)
    mode = str(data[12 : 12 + length], "utf-8")
    return image.frombytes(mode, (width, height), data[12 + length :])


# Image formats by encoding, and for lists the offset of the count.
_IMAGES: dict[str, tuple[str, int | None]] = {
    **{name: (name, None) for name in ("pil", "jpeg", "png")},
    **{f"list[{name}]": (name, 4) for name in ("pil", "jpeg", "png")},
    "jpeg_array": ("jpeg", 0),
    "jpegarray": ("jpeg", 0),
}
_DECODERS: dict[str, Decode] = {
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

    A sample is a dict of values by column, decoded as in MosaicML Streaming to numbers,
    text, bytes, JSON, arrays (copied) or Pillow images. Shards may be compressed by
    gzip or zstandard. An uncompressed shard resumes at any sample without reading
    earlier ones, and is split if there are fewer shards than readers.

    Args:
        addresses: Directories with an ``index.json``, as paths, URLs or patterns.
        allow_unsafe_types: Whether to load pickled columns. Loading a pickle runs any
            code that its author put there.
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
    """A shard, or the part of a shard from byte ``start`` to byte ``stop``."""

    address: Address
    samples: int  # of the whole shard
    size: int  # of the whole shard, decompressed, in bytes
    columns: tuple[Encoded, ...]
    start: int  # 0 for a whole shard
    stop: int


class MDSFormat(ByteFormat):
    """The format of MDS shards, which ``index.json`` files list."""

    def __init__(
        self, addresses: Any, storage: Storage, *, allow_unsafe_types: bool
    ) -> None:
        indexes = [_joined(folder, _INDEX) for folder in sealed(addresses)]
        super().__init__(indexes, storage, ByteFormatSpec(partial(samples, (), 0, 0)))
        self._allow_unsafe_types = allow_unsafe_types

    async def shards(
        self, stack: AsyncExitStack, _known: Summary | None = None
    ) -> list[Any]:
        """Return the shards that the indexes list, in the order of the indexes."""
        indexes = await super().shards(stack)
        shards: list[MDSShard] = []
        for address in indexes:
            folder = sibling(address, lambda path: path.removesuffix(_INDEX))
            label = self.storage.label(address)
            data = await read_whole(self.storage.open(address, 0, _READ_BYTES))
            try:
                entries = json.loads(data)["shards"]
                shards += [_shard(folder, entry) for entry in entries]
            except (ValueError, KeyError, TypeError) as error:
                text = f"{label!r} is no index of MDS shards: {error!r}; write it again"
                raise DatasetError(text, location=label) from error
        if not shards:
            raise ValueError(
                f"no shards: the index {self.storage.label(indexes[0])!r} lists none; "
                "pass a directory that MDSWriter has finished"
            )
        for columns in {shard.columns for shard in shards}:  # check the encodings
            _decoders(columns, allow_unsafe_types=self._allow_unsafe_types)
        return shards

    async def cut(self, shards: Sequence[Any], count: int) -> Sequence[Any]:
        """Return ``count`` parts of the shards, split between samples."""
        parts: list[MDSShard] = []
        counts = shares([shard.size for shard in shards], count)
        for shard, number in zip(shards, counts, strict=True):
            starts: Sequence[int] = ()
            if number > 1 and not unpacker_of(self.storage.label(shard.address)):
                stop = 4 + 4 * shard.samples
                head = self.storage.open(shard.address, 0, _READ_BYTES, stop=stop)
                offsets = f"<{shard.samples}I"
                starts = struct.unpack_from(offsets, await read_whole(head), 4)
                starts = nearest(starts, shard.size, number)
            parts += [
                shard._replace(start=start, stop=stop)
                for start, stop in itertools.pairwise([0, *starts, shard.size])
            ]
        if len(parts) < count:
            raise ValueError(
                f"{len(shards)} shards can be cut into {len(parts)} parts only, but "
                f"there are {count} readers (ranks x workers, or as `readers` says): "
                "compressed shards cannot be cut; use fewer readers, or smaller shards"
            )
        return parts

    async def sizes(self, shards: Sequence[Any], *, must: bool) -> Sequence[int] | None:  # noqa: ARG002  (all are known)
        """Return the number of samples of each shard."""
        return [shard.samples for shard in shards]

    def summary(self, shards: Sequence[Any]) -> Summary:
        """Return checksums of the shards' names, parts and numbers of samples."""
        edges = [[shard.start, shard.stop, shard.samples] for shard in shards]
        names = summary_of(shard.address for shard in shards)
        whole = summary_of([json.dumps(edges)])
        return {**names, "samples": whole["names"]}

    def address(self, shard: Any) -> Address:
        """Return the address of a shard, or of the shard that a part is from."""
        address: Address = shard.address
        return address

    def spec(self, shard: Any) -> ByteFormatSpec:
        """Return a shard's spec, which can decode a single sample from its bytes."""
        allow = self._allow_unsafe_types
        columns = _decoders(shard.columns, allow_unsafe_types=allow)
        return self._spec._replace(quick=partial(_single, columns, *_layout(columns)))

    async def offsets(self, shard: Any) -> Offsets:
        """Return the samples' offsets and the last sample's end, from the head."""
        stop = 8 + 4 * shard.samples
        head = self.storage.open(shard.address, 0, _READ_BYTES, stop=stop)
        table = np.frombuffer(await read_whole(head), "<u4")
        if len(table) != shard.samples + 2 or table[0] != shard.samples:
            label = self.storage.label(shard.address)
            count = f"{shard.samples:,} samples, as in the index"
            raise _damage(label, 0, f"its head is not that of {count}")
        if (table[2:] < table[1:-1]).any():
            label = self.storage.label(shard.address)
            raise _damage(label, 4, "the offsets in its head do not rise")
        return table[1:]

    def open(self, shard: Any, position: ShardPosition, budget: int) -> ShardReader:
        """Return a reader of a shard or part of a shard, from ``position`` on."""
        # Read a whole shard to its end, because extra bytes reveal a wrong index.
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
    decoders: list[MDSColumn] = []
    for name, encoding, size in columns:
        try:
            decode = decoder_of(encoding, allow_unsafe_types=allow_unsafe_types)
        except ValueError as error:
            raise ValueError(f"column {name!r}: {error}") from None
        decoders.append((name, decode, size))
    return decoders


def _shard(folder: Address, entry: dict[str, Any]) -> MDSShard:
    """Parse an entry of an index; raise a ValueError for an unsupported format."""
    if entry["format"] != "mds" or entry["version"] != 2:
        version = f"format {entry['format']!r}, version {entry['version']!r}"
        raise ValueError(f"a shard has {version}; only 'mds', version 2, is supported")
    compressed, raw = entry["zip_data"], entry["raw_data"]
    name = (compressed or raw)["basename"]
    if compressed and unpacker_of(name) is None:
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
    """Yield a shard's samples from the position of ``feed`` to byte ``stop``.

    A sample that cannot be decoded is one failed sample. Wrong lengths, missing bytes,
    or bytes after the last sample, end the shard with an error.
    """
    lengths, fixed = _layout(columns)
    offset, ends = feed.at, iter(memoryview(b""))  # no table after a resume
    try:
        if not offset:
            head = yield from _read(_SHARD_HEAD.size, stop, feed)
            number, first = cast("tuple[int, int]", _SHARD_HEAD.unpack(head))
            if number != count or not 8 + 4 * number <= first <= stop:
                raise _damage(
                    feed.url,
                    0,
                    f"{number:,} samples, the first at {first:,}, where the index has "
                    f"{count:,} in {stop:,} bytes",
                )
            table = yield from _read(first - 8, stop, feed)
            offset, ends = first, iter(memoryview(table)[: 4 * number].cast("I"))
        while offset < stop:
            head = yield from _read(lengths.size, stop, feed)
            length = lengths.size + fixed + sum(lengths.unpack(head))
            end = offset + length
            table_end = next(ends, end)
            if end > stop or end != table_end:
                reason = f"to byte {end:,}, which its table ends at {table_end:,}"
                if end > stop:
                    reason = f"of {length:,} bytes, after the shard's end"
                raise _damage(feed.url, offset, f"a sample {reason}")
            body = yield from _read(length - lengths.size, stop, feed)
            sizes = iter(lengths.unpack(head))
            sample = _decode(columns, sizes, body, feed.url, offset)
            offset = end
            yield [sample], offset
        if (yield from feed.take(1)):
            reason = "bytes after the last sample that the index lists"
            raise _damage(feed.url, offset, reason)
    except DatasetError as error:
        yield [FailedSample(error, ends=True)], offset


def _layout(columns: Sequence[MDSColumn]) -> tuple[struct.Struct, int]:
    """Return the struct of a sample's lengths, and the total size of fixed columns."""
    lengths = struct.Struct(f"<{sum(not size for *_, size in columns)}I")
    return lengths, sum(size or 0 for *_, size in columns)


def _single(
    columns: Sequence[MDSColumn],
    lengths: struct.Struct,
    fixed: int,
    url: str,
    start: int,
    data: memoryview,
) -> Any:
    """Decode the sample in ``data``; return a ``FailedSample`` if it is damaged."""
    length = lengths.size
    if len(data) >= length:
        sizes = lengths.unpack_from(data)
        length += fixed + sum(sizes)
        if length == len(data):
            body = bytes(data[lengths.size :])
            return _decode(columns, iter(sizes), body, url, start)
    end = start + len(data)
    reason = f"a sample to byte {start + length:,}, which its table ends at {end:,}"
    return FailedSample(_damage(url, start, reason))


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
    offset, sample, name = 0, dict[str, Any](), ""
    try:
        for name, decode, size in columns:
            stop = offset + (size or next(sizes))
            sample[name] = decode(body[offset:stop])
            offset = stop
    except Exception as error:  # noqa: BLE001  (of an image, for example)
        failure = DatasetError(
            f"{url!r}: the sample at byte {start:,} is damaged: column {name!r}: "
            f"{type(error).__name__}: {error}; write it again, or skip it",
            location=url,
        )
        failure.__cause__ = error
        return FailedSample(failure)
    return sample


def _damage(url: str, offset: int, reason: str) -> DatasetError:
    return DatasetError(
        f"{url!r} is damaged at byte {offset:,}: {reason}; write it again", location=url
    )
