"""Tar shards in WebDataset's layout: members with the same key make one sample.

The parser reads v7, ustar, GNU and PAX archives. Members that are whole in the buffer
and have a plain header take a fast path. A damaged header ends the archive. Damage to
bodies, long names and PAX records is not detected: tar has no checksum for them.

The index ``shard.tar.idx`` has the offset of each sample, and the last sample's end,
as little-endian 64-bit integers, as in NVIDIA's Megatron-Energon and NeMo. It allows an
archive to be split between samples if there are fewer shards than readers.
"""

import logging
from collections.abc import Generator, Sequence
from functools import lru_cache, partial
from struct import Struct
from typing import Any, ClassVar, TypeAlias, Unpack
from zlib import adler32

from aioloader._base.blocks import FailedSample
from aioloader._base.warnings import warn
from aioloader.datasets._checks import check_at_least, check_word, names_options
from aioloader.datasets._stores.addresses import Address, sibling
from aioloader.datasets._stores.storage import Storage
from aioloader.datasets._streams.edges import (
    fits,
    index_name,
    not_its_index,
    read_index,
    without_end,
)
from aioloader.datasets._streams.engine import (
    ByteFeed,
    ByteFormatSpec,
    Cuts,
    Steps,
    nearest,
)
from aioloader.datasets._streams.shards import MissingEnd
from aioloader.datasets.sharded import (
    MAX_SAMPLE_BYTES,
    Addresses,
    ByteStream,
    StreamOptions,
)
from aioloader.errors import DatasetError, TruncatedReadError

_LOG = logging.getLogger("aioloader")
_BLOCK = 512
_ZEROS = bytes(_BLOCK)
# A longer name or PAX header is damage, or an attack.
_MAX_EXTENDED_BYTES = 1 << 20

# Typeflags.
_PAX, _GLOBAL, _LONG_NAME = b"xgL"
_PAX_KINDS = b"xX"  # Solaris writes X for x
_SPARSE = ord("S")
_REGULAR = b"0\x007S"
_LINKS = b"12"
_EXTENDED = b"LKxXg"
_PLAIN = b"0\0"
_BODILESS = b"123456"  # links, devices, directories, fifos; their size is ignored

# Fields before the checksum (with name and size), the checksum, and the fields from
# the typeflag on, which are equal for members of the same type and owner.
_HEADER = Struct("148s8s356s")
_TYPE = 156
# Limits of the caches of name endings and of sample keys.
_MAX_ENDINGS = 64
_MAX_KEYS = 1000
_SLASH, _UNDERSCORE = ord("/"), ord("_")
# Last characters of hidden files' keys, whose base name is empty. WebDataset would make
# a useless sample "folder/" of the hidden files in a folder.
_NO_STEM = frozenset({"", "/"})
# A member's field (None: skip the body), and the size of its body.
_Member: TypeAlias = tuple[str | None, int]


class DamageError(Exception):
    """Damage to an archive; the handler adds the location to the message."""


def _is_sound(block: bytes) -> bool:
    """Tell whether a header's checksum is right; old archives sum signed bytes."""
    try:
        checksum = _read_number(block[148:_TYPE])
    except DamageError:
        return False
    rest = block[:148] + b" " * 8 + block[_TYPE:]
    # In halves, because the sum of 256 bytes stays below Adler's modulus.
    total = (adler32(rest[:256]) & 0xFFFF) + (adler32(rest[256:]) & 0xFFFF) - 2
    if total == checksum:
        return True
    return total - 256 * sum(byte > 127 for byte in rest) == checksum


@lru_cache(maxsize=16)  # some writers put the same header before each member
def _size_of_pax(block: bytes) -> int | None:
    """Return the size of a PAX header's records; None if the header is invalid."""
    try:
        return _read_extended_size(block) if _is_sound(block) else None
    except DamageError:
        return None


def _read_extended_size(block: bytes) -> int:
    size = _read_number(block[124:136])
    if size > _MAX_EXTENDED_BYTES:
        raise DamageError(f"a long name or PAX header of {size:,} bytes, over 1 MiB")
    return size


def _read_size(block: bytes, extras: dict[str, bytes]) -> int:
    digits = extras.get("size")
    if block[_TYPE] in _BODILESS:
        return 0
    if not digits:
        return _read_number(block[124:136])
    if len(digits) > 20 or not digits.isdigit():
        raise DamageError(f"{digits[:20]!r} for a size in a PAX header")
    return int(digits)


def _read_number(field: bytes) -> int:
    """Parse a number in octal digits, or in base 256 if the top bit is set."""
    try:
        if field[0] & 0x80:
            number = int.from_bytes(field, signed=True)
            # The top bit marks base 256, and the next bit is the sign.
            number += 0 if field[0] & 0x40 else 1 << (8 * len(field) - 1)
        else:
            number = int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        raise DamageError(f"{field!r} for an octal number") from None
    if number < 0:
        raise DamageError(f"a negative number, {number:,}")
    return number


def _read_name(block: bytes) -> bytes:
    if block[345] and block[257:263] == b"ustar\0":
        return block[345:500].partition(b"\0")[0] + b"/" + block[:100]
    return block[:100]


def _read_text(field: bytes) -> str:
    """Decode a field up to its first zero; invalid UTF-8 becomes surrogates."""
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _is_irrelevant(records: bytes) -> bool:
    """Tell whether PAX records affect neither name, size nor sparseness."""
    has_any = b"path=" in records or b"size=" in records or b"GNU.sparse." in records
    return not has_any


def _read_pax(records: bytes) -> dict[str, bytes]:
    """Return the relevant PAX records, with the keys path, size and sparse."""
    extras: dict[str, bytes] = {}
    offset, records = 0, b"" if _is_irrelevant(records) else records.rstrip(b"\0")
    while offset < len(records):  # lines of "length key=value"
        space = records.find(b" ", offset, offset + 20)
        digits = records[offset : max(space, offset)]
        stop = offset + int(digits) if digits.isdigit() else 0
        if stop <= space or records[stop - 1 : stop] != b"\n":
            raise DamageError(f"a broken PAX record at byte {offset:,} of its header")
        key, _, value = records[space + 1 : stop - 1].partition(b"=")
        if key == b"size":
            extras["size"] = value
        elif key in {b"path", b"GNU.sparse.name"}:
            extras["path"] = value
        if key.startswith(b"GNU.sparse."):
            extras["sparse"] = value
        offset = stop
    return extras


def split_name(name: str) -> tuple[str, str] | None:
    """Return a member's key and field; None if the member belongs to no sample."""
    key, dot, field = name.partition(".")
    if "/" in field:  # the dot is in a folder name
        folder, _, base = name.rpartition("/")
        stem, dot, field = base.partition(".")
        key = f"{folder}/{stem}"
    if not dot or key[-1:] in _NO_STEM:
        return None
    top = name.partition("/")[0]
    if len(top) >= 4 and top.startswith("__") and top.endswith("__"):  # "__meta__"
        return None
    return key, field.lower()


def samples(max_sample_bytes: int, missing_end: MissingEnd, feed: ByteFeed) -> Steps:
    """Yield an archive's samples; each unreadable sample becomes a ``FailedSample``.

    ``feed`` starts at a sample's first header; global PAX headers before it are not
    applied. While its pieces are joined, a member takes twice its size in memory.
    """
    return _Archive(max_sample_bytes, missing_end, feed).read()


class _Archive:
    """Parser of one archive; collects the members of the current sample."""

    def __init__(
        self, max_sample_bytes: int, missing_end: MissingEnd, feed: ByteFeed
    ) -> None:
        self._feed, self._url = feed, feed.url
        self._max_bytes, self._missing_end = max_sample_bytes, missing_end
        # Complete samples to yield, with failures in place of those that failed.
        self._ready: list[Any] = []
        # The current sample: key, offset, bytes left to its limit, fields, failure.
        self._key: str | None = None
        self._start = self._bytes_left = 0
        self._fields: dict[str, Any] = {}
        self._failure: FailedSample | None = None
        # Name of the last member, and offset of the last header, for errors.
        self._member_name, self._offset = b"", feed.at
        self._globals: dict[str, bytes] = {}
        # The last plain header from its typeflag on, and the sum of these bytes; the
        # key as bytes, if known; fields by the part of a name after the first dot.
        self._tail, self._tail_sum = b"", 0
        self._stem: bytes | None = None
        self._endings: dict[bytes, str] = {}
        # Field names of the first samples, by key.
        self._first_fields: dict[str, frozenset[str]] = {}

    @property
    def _name(self) -> str:
        return _read_text(self._member_name)

    def read_single(self, url: str, start: int, data: memoryview) -> Any:
        """Return the only sample in ``data``, or NotImplemented if the fast path fails.

        Headers like those of earlier samples are parsed faster.
        """
        feed, self._url = self._feed, url
        feed.restart(start, data)
        self._key = self._stem = self._failure = None
        member = self._read_plain_members()
        if self._ready or member is not None or feed.used < len(feed.view):
            self._ready = []
            return NotImplemented
        return NotImplemented if self._key is None else self._failure or self._fields

    def read(self) -> Steps:
        error: DatasetError | None = None
        yield None  # wait for a piece, so that its first member takes the fast path
        try:
            yield from self._read_members()
        except DamageError as exc:
            name = self._name
            after = f"after member {name!r}" if name else "the first one read"
            text = f"{self._url!r} is damaged at byte {self._offset:,}, {after}: {exc}"
            error = DatasetError(text + self._loss(), location=self._url)
        except DatasetError as cut:
            error = cut
        if error is not None:
            if self._failure is not None:  # the sample keeps its own error
                self._end_sample()
            self._ready.append(FailedSample(error, ends=True))
        if self._ready:
            yield self._ready, self._offset

    def _read_members(self) -> Steps:
        while True:
            member = None if self._globals else self._read_plain_members()
            if member is None and not self._ready:
                member = yield from self._read_headers()
                if member is None:
                    return
            if self._ready:
                ready, self._ready = self._ready, []
                yield ready, self._feed.at if self._key is None else self._start
            if member is not None:
                field, size = member
                is_kept = field is not None
                body = yield from self._read_body(
                    f"member {self._name!r}", size, is_kept=is_kept
                )
                if field is not None:
                    self._fields[field] = body

    def _read_plain_members(self) -> _Member | None:
        """Read plain members; return a member with a partly buffered body, or None."""
        feed, view, offset = self._feed, self._feed.view, self._feed.used
        base, length, ready, want = feed.at - offset, len(view), self._ready, feed.want
        start, name, member = offset, b"", None
        while (body := offset + _BLOCK) <= length and len(ready) < want:
            head, checksum, tail = _HEADER.unpack_from(view, offset)
            if tail != self._tail:
                block = bytes(view[offset:body])
                if block[_TYPE] == _PAX and (following := self._skip_pax(block, body)):
                    offset = following
                    continue
                if not self._keep_tail(block):
                    break
            try:
                size = int(head[124:136].rstrip(b"\0 "), 8)
                expected = int(checksum.rstrip(b"\0 "), 8)
            except ValueError:
                break
            # The low half of Adler-32 is 1 + sum(bytes), modulo 65521, which 148 bytes
            # do not reach: exact, and much faster than `sum`.
            if (adler32(head) & 0xFFFF) + self._tail_sum != expected or size < 0:
                break
            name = head[:100]
            field = self._field_of(name, size, base + start)
            start = offset = (stop := body + size) + (-size & 511)
            if offset > length:
                start, member = body, (field, size)
                break
            if field is not None:
                self._fields[field] = view[body:stop].tobytes()
        self._member_name = name or self._member_name
        feed.used = start
        return member

    def _skip_pax(self, block: bytes, body: int) -> int:
        """Return the offset after an irrelevant PAX header; 0 if the header matters."""
        size = _size_of_pax(block)
        if size is None:
            return 0
        view = self._feed.view
        following = (stop := body + size) + (-size & 511)
        is_whole = following <= len(view) and _is_irrelevant(bytes(view[body:stop]))
        return following if is_whole else 0

    def _keep_tail(self, block: bytes) -> bool:
        """Cache a header's fields from the typeflag on; return whether it is plain."""
        is_plain = block[_TYPE] in _PLAIN and not block[345]
        if is_plain:
            self._tail = block[_TYPE:]
            # 255: eight spaces in place of the checksum, minus Adler's initial 1.
            self._tail_sum = sum(self._tail.translate(None, b"\0")) + 255
        return is_plain

    def _read_headers(self) -> Generator[Any, None, _Member | None]:
        """Read a member's headers; return its field and size, or None at the end."""
        start, extras = self._feed.at, dict[str, bytes]()
        while True:
            block = yield from self._read_header(start)
            if block is None or (kind := block[_TYPE]) not in _EXTENDED:
                break
            owner = "the long name or PAX header of a member"
            data = yield from self._read_body(owner, _read_extended_size(block))
            if kind == _LONG_NAME:
                extras["path"] = data
            elif kind == _GLOBAL:
                self._globals.update(_read_pax(data))
                # Only this type may be the last header, without a member.
                start = self._feed.at if start == self._offset else start
            elif kind in _PAX_KINDS:
                extras.update(_read_pax(data))
        if block is None:
            return None
        extras = {**self._globals, **extras}
        name, size = extras.get("path") or _read_name(block), _read_size(block, extras)
        self._member_name, field = name, None
        if kind in _LINKS:
            _log_once(_LINK_WARNING, self._url, self._name)
        elif kind in _REGULAR:
            field = self._field_of(name, size, start)
        if field is not None and (kind == _SPARSE or "sparse" in extras):
            self._fail_sample(name, "is sparse, which is not supported")
            field = None
        yield from self._skip_map(block)
        return field, size

    def _read_header(self, start: int) -> Generator[Any, None, bytes | None]:
        """Read a header of the member at ``start``; return None at the end marker."""
        self._offset = self._feed.at
        block = yield from self._feed.take(_BLOCK)
        if len(block) < _BLOCK or block == _ZEROS:
            yield from self._read_end(block, is_between=start == self._offset)
            return None
        if not _is_sound(block):
            hint = "" if self._name else "; is it a tar archive, and not compressed?"
            raise DamageError(f"no header, or one with a wrong checksum{hint}")
        return block

    def _skip_map(self, block: bytes) -> Steps:
        """Skip the rest of a sparse member's map, which the size field excludes."""
        has_more = block[_TYPE] == _SPARSE and block[482]
        while has_more:
            block = yield from self._feed.take(_BLOCK)
            if len(block) < _BLOCK:
                raise self._truncated_header(len(block))
            has_more = block[504]

    def _read_body(
        self, owner: str, size: int, *, is_kept: bool = True
    ) -> Generator[None, None, bytes]:
        """Return a body, and skip its padding; without ``is_kept``, skip both."""
        feed, begin, data = self._feed, self._feed.at, b""
        padded = size + (-size & 511)
        if is_kept:
            data = yield from feed.take(size)
        missing = yield from feed.skip(padded - len(data))
        if missing:
            received = padded - missing
            expected = size if received < size else padded
            raise self._truncated(owner, begin, expected, received)
        return data

    def _read_end(self, block: bytes, *, is_between: bool) -> Steps:
        """Check the archive's end marker, whose first block is ``block``."""
        feed = self._feed
        if len(block) < _BLOCK:
            if block or not is_between:
                raise self._truncated_header(len(block))
            self._check_missing_end()
            self._end_sample()
            return
        if not is_between:
            raise DamageError("zeros where a member must follow its long name")
        block = yield from feed.take(_BLOCK)
        if 0 < len(block) < _BLOCK:
            raise self._truncated_header(len(block))
        if block.strip(b"\0"):
            raise DamageError("a lone block of zeros")
        self._end_sample()
        ready, self._ready = self._ready, []
        yield ready, self._offset
        while not feed.has_ended:
            rest = bytes(feed.view[feed.used :])
            feed.used = len(feed.view)
            if rest.strip(b"\0"):
                raise DamageError(
                    "the zeros that end an archive, with other bytes after them; data "
                    "is missing there, or archives were joined: join them by `tar -A`"
                )
            yield None

    def _check_missing_end(self) -> None:
        total = self._feed.at
        if self._feed.is_part:
            return
        if total and self._missing_end == "warn":
            warn(
                f"{self._url!r} stops at byte {total:,} without the zeros at the end "
                "of a tar archive; it is read to there, because of missing_end='warn'"
            )
            return
        raise without_end(self._url, total, self._loss())

    def _truncated_header(self, received: int) -> TruncatedReadError:
        place = f"the header after member {self._name!r}"
        if not self._name:
            place = "its first header (is it a tar archive, and not compressed?)"
        return self._truncated(place, self._feed.at - received, _BLOCK, received)

    def _truncated(
        self, place: str, begin: int, expected: int, received: int
    ) -> TruncatedReadError:
        return TruncatedReadError(
            f"{self._url!r} ends within {place}: {received:,} of {expected:,} bytes at "
            f"byte {begin:,}{self._loss()}",
            location=self._url,
            expected=expected,
            received=received,
        )

    def _loss(self) -> str:
        """Return the end of an error message, with the lost sample and what to do."""
        todo = "; write or download it again"
        if self._key is None or self._failure is not None:
            return todo
        return f"; sample {self._key!r} at byte {self._start:,} is lost{todo}"

    def _field_of(self, name: bytes, size: int, start: int) -> str | None:
        """Return the field for a member's body; None if the body is to be skipped.

        A new key ends the current sample. Names with a known ending take a fast path.
        """
        stem, dot, ending = name.partition(b".")
        field, key_bytes = self._endings.get(ending) if dot else None, None
        if field is None or stem != self._stem:
            is_plain = field is not None and stem and 0 not in stem
            if is_plain and stem[-1] != _SLASH and stem[0] != _UNDERSCORE:
                key, key_bytes = stem.decode("utf-8", "surrogateescape"), stem
            elif split := split_name(_read_text(name)):
                key, field = split
                if dot and b"\0" not in stem and b"/" not in ending:
                    if len(self._endings) >= _MAX_ENDINGS:
                        self._endings.clear()
                    self._endings[ending] = field
            else:
                return None
            if key != self._key:
                self._end_sample()
                self._key, self._start, self._bytes_left = key, start, self._max_bytes
                self._fields = {"__key__": key, "__url__": self._url}
            self._stem = key_bytes
        assert field is not None
        self._bytes_left -= size
        if self._failure is not None:
            return None
        if field in self._fields:
            self._fail_sample(name, f"is the second one for the field {field!r}")
        elif self._bytes_left < 0:
            limit = f"larger than max_sample_bytes ({self._max_bytes:,})"
            reason = f"has {size:,} bytes, which makes the sample {limit}"
            self._fail_sample(name, reason)
        return None if self._failure else field

    def _end_sample(self) -> None:
        """Finish the current sample; warn if it seems part of an earlier sample."""
        key, fields = self._key, self._fields
        if key is None:
            return
        self._ready.append(self._failure or fields)
        first = self._first_fields.get(key)
        if first is None:
            if len(self._first_fields) < _MAX_KEYS:
                self._first_fields[key] = frozenset(fields)
        elif len(first & fields.keys()) == 2:  # __key__ and __url__
            _log_once(_SPLIT_WARNING, self._url, key, f"{self._start:,}")
        self._key = self._failure = None

    def _fail_sample(self, name: bytes, reason: str) -> None:
        """Mark the current sample as failed; its other members are skipped."""
        text = f"{self._url!r}: sample {self._key!r} at byte {self._start:,} "
        text += f"cannot be read: its member {_read_text(name)!r} {reason}"
        self._failure = FailedSample(DatasetError(text, location=self._url))
        self._fields = {}


class _SingleSamples:
    """Parses single samples, in any thread; parsers are reused, with their caches."""

    def __init__(self, max_sample_bytes: int, missing_end: MissingEnd) -> None:
        self._args = max_sample_bytes, missing_end
        self._free: list[_Archive] = []

    def __call__(self, url: str, start: int, data: memoryview) -> Any:
        try:
            archive = self._free.pop()
        except IndexError:  # other threads use all parsers
            archive = _Archive(*self._args, ByteFeed(url, start, is_part=True))
        sample = archive.read_single(url, start, data)
        self._free.append(archive)
        return sample

    def __reduce__(self) -> tuple[Any, ...]:
        return _SingleSamples, self._args


# Warnings that explain why a sample may lack a field.
_LINK_WARNING = (
    "%r: member %r is a link, and links are skipped: the archive does not hold what "
    "they lead to; pack with `tar --dereference --hard-dereference`"
)
_SPLIT_WARNING = (
    "%r: sample %r at byte %s has other fields than an earlier sample of that key, and "
    "both are incomplete if they are one: its members must be next to each other; pack "
    "with `tar --sort=name`"
)


def _log_once(text: str, url: str, *about: object) -> None:
    """Log a warning about an archive; each text is logged once per process."""
    if text not in _LOGGED:
        _LOGGED.append(text)
        _LOG.warning(text, url, *about)


_LOGGED: list[str] = []


async def at_samples(
    storage: Storage, address: Address, size: int, count: int
) -> Sequence[int] | str:
    """Return offsets to split an archive at, or a reason why there is no index."""
    numbers = await read_index(storage, address)
    if numbers is None:
        name = storage.label(sibling(address, index_name))
        return f"has no index, {name!r}: write it with `aioloader index`"
    end = int(numbers[-1])
    if not fits(end, size):
        why = f"the shard has {size:,} bytes, and the index ends at {end:,}"
        raise not_its_index(storage, address, why)
    return nearest(numbers[:-1].tolist(), size, count)


class TarDataset(ByteStream[dict[str, Any]]):
    """Streams samples from tar files.

    Consecutive members with the same key (the path up to the first dot of the name)
    make one sample: ``{"__key__": ..., "__url__": ..., "jpg": b"...", "cls": b"7"}``.
    The caller owns the bytes. Links are skipped. The first link is logged, and so is
    the first sample whose members are not consecutive. Archives may be compressed by
    gzip, zstandard, bzip2 or xz. Uncompressed archives resume at any sample; at most
    8 MB of earlier data are read again. If there are fewer shards than readers,
    ``a.tar`` is split by its index ``a.tar.idx``.

    Args:
        addresses: Paths or URLs, such as ``"s3://bucket/train-{000..127}.tar"``.
        max_sample_bytes: Samples above this size fail without being buffered.
        missing_end: What to do if a tar lacks the zeros at its end: ``"error"``
            raises instead of the last sample, which may be cut; ``"warn"`` reads it.
        options: ``store``, ``store_options``, ``shuffle``, ``interleave``, ``cache``
            and all others of ``StoredStream``.

    Raises:
        ValueError: If an argument is wrong.

    Example:
        >>> import asyncio, io, tarfile, tempfile
        >>> path = tempfile.mktemp(".tar")
        >>> with tarfile.open(path, "w") as tar:
        ...     member = tarfile.TarInfo("a.txt")
        ...     member.size = 2
        ...     tar.addfile(member, io.BytesIO(b"hi"))
        >>> async def texts():
        ...     return [sample["txt"] async for sample in TarDataset(path)]
        >>> asyncio.run(texts())
        [b'hi']
    """

    cuts: ClassVar[Cuts | None] = staticmethod(at_samples)

    @names_options
    def __init__(
        self,
        addresses: Addresses,
        *,
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
        missing_end: MissingEnd = "error",
        **options: Unpack[StreamOptions],
    ) -> None:
        check_at_least(max_sample_bytes, 1, "max_sample_bytes")
        check_word(missing_end, MissingEnd, "missing_end")
        steps = partial(samples, max_sample_bytes, missing_end)
        quick = _SingleSamples(max_sample_bytes, missing_end)
        kind = ByteFormatSpec(steps, is_quick=True, piece=1 << 19, quick=quick)
        kind = kind._replace(tail=_BLOCK if missing_end == "error" else 0)
        super().__init__(addresses, kind, **options)
