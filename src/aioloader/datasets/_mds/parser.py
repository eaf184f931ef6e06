"""Parses one MDS shard: bytes in any pieces to samples, without I/O.

A shard starts with the number of samples, their offsets and the writer's options. A
sample has its own length, so parsing can start at any sample without the offsets.
"""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from typing_extensions import Buffer

from aioloader._order.blocks import Bad
from aioloader.datasets._mds.encodings import Decode
from aioloader.errors import DatasetError, TruncatedReadError


class Column(NamedTuple):
    """A column: its name, its decoder, and its size in bytes if that is fixed."""

    name: str
    decode: Decode
    size: int | None


class MDSParser:
    """Makes samples from the bytes of one shard.

    A sample that cannot be decoded is one failed sample; damaged lengths end the shard,
    and so do bytes after the last sample.

    Args:
        url: Address of the shard, for errors.
        columns: Columns of its samples.
        samples: Number of samples.
        stop: End of the samples: for a whole shard, its length.
        offset: Offset of the first byte fed: 0, or the start of a sample.
    """

    def __init__(
        self,
        url: str,
        columns: Sequence[Column],
        *,
        samples: int,
        stop: int,
        offset: int = 0,
    ) -> None:
        self.offset = offset
        self.is_over = False
        self._url = url
        self._columns = columns
        self._samples = samples
        self._stop = stop
        self._is_begun = offset > 0
        self._is_ended = False
        self._data = bytearray()
        self._at = 0  # read position in the data
        self._need = 4
        self._head = struct.Struct(f"<{sum(not one.size for one in columns)}I")
        self._fixed = sum(one.size or 0 for one in columns)

    def feed(self, piece: Buffer) -> None:
        """Add bytes."""
        del self._data[: self._at]
        self._at = 0
        self._data += piece

    def end(self) -> None:
        """Note that there are no more bytes."""
        self._is_ended = True

    def take(self, limit: int) -> list[Any]:
        """Return up to ``limit`` samples; a ``Bad`` for each that cannot be decoded."""
        samples: list[Any] = []
        try:
            if not self._is_begun:
                self._begin()
            while self._is_begun and not self.is_over and len(samples) < limit:
                data = self._next()
                if data is None:
                    break
                samples.append(self._decode(data))
                self.offset += len(data)
            if self._is_ended and not self.is_over and len(samples) < limit:
                self._check_end()
                self.is_over = True
        except DatasetError as error:
            samples.append(Bad(error))
            self.is_over = True
        return samples

    def _take(self, length: int) -> memoryview | None:
        """Return the next bytes without taking them; None if they are not all there."""
        if len(self._data) - self._at < length:
            return None
        return memoryview(self._data)[self._at : self._at + length]

    def _begin(self) -> None:
        """Read number and offsets of the samples, and move to the first one."""
        view = self._take(8)
        if view is None:
            return
        count, first = struct.unpack("<2I", view)
        if count != self._samples or not 8 + 4 * count <= first <= self._stop:
            raise self._damage(
                f"{count:,} samples, the first at {first:,}, where the index has "
                f"{self._samples:,} in {self._stop:,} bytes"
            )
        if self._take(first) is not None:
            self._at = self.offset = first
            self._is_begun = True

    def _next(self) -> bytes | None:
        """Return the bytes of the next sample; None if there are not all of them."""
        if self.offset >= self._stop:
            if self._at < len(self._data):
                raise self._damage("bytes after the last sample that the index lists")
            return None
        head = self._take(self._head.size)
        if head is None:
            return None
        length = self._head.size + self._fixed + sum(self._head.unpack(head))
        if self.offset + length > self._stop:
            raise self._damage(f"a sample of {length:,} bytes, after the shard's end")
        whole = self._take(length)
        if whole is None:
            return None
        data = bytes(whole)
        self._at += length
        return data

    def _decode(self, data: bytes) -> Any:
        lengths = iter(self._head.unpack_from(data))
        at, sample = self._head.size, dict[str, Any]()
        name = ""
        try:
            for name, decode, size in self._columns:
                stop = at + (size or next(lengths))
                sample[name] = decode(data[at:stop])
                at = stop
        except Exception as error:  # noqa: BLE001  (of a picture, for example)
            failure = DatasetError(
                f"{self._url!r}: the sample at byte {self.offset:,} is damaged: column "
                f"{name!r}: {type(error).__name__}: {error}",
                location=self._url,
            )
            failure.__cause__ = error
            return Bad(failure)
        return sample

    def _damage(self, what: str) -> DatasetError:
        text = f"{self._url!r} is damaged at byte {self.offset:,}: {what}"
        return DatasetError(text, location=self._url)

    def _check_end(self) -> None:
        if self._is_begun and self.offset >= self._stop:
            return
        received = self.offset + len(self._data) - self._at
        raise TruncatedReadError(
            f"{self._url!r} has {received:,} of {self._stop:,} bytes",
            location=self._url,
            expected=self._stop,
            received=received,
        )
