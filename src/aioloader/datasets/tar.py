"""Tar shards, read like WebDataset: members with the same key make a sample.

v7, ustar, GNU and PAX. Members with a plain header that lies whole in a piece take a
fast path, all others are read step by step. Damage ends the archive; it is not detected
in bodies, long names and PAX headers, which have no checksum. An archive ends with
zeros: a single block of them is enough, and only zeros may follow.

Where the samples start is in ``shard.tar.idx``, next to the archive: little-endian
64-bit numbers, one per sample, then one for the end of the last member, as NVIDIA's
Megatron-Energon and NeMo have it. With it an archive can be cut between samples when
there are fewer shards than readers.
"""

import logging
import os
from collections.abc import Generator, Sequence
from functools import lru_cache, partial
from pathlib import Path
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
    index_bytes,
    index_name,
    not_its_index,
    read_index,
)
from aioloader.datasets._streams.engine import (
    ByteFeed,
    ByteFormatSpec,
    Cuts,
    Steps,
    nearest,
    scanned,
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
_EXTENDED_BYTES = 1 << 20  # a longer name or PAX header is damage, or an attack

# Typeflags.
_PAX, _GLOBAL, _LONG_NAME = b"xgL"
_PAX_KINDS = b"xX"  # X is Solaris' x
_SPARSE = ord("S")
_REGULAR = b"0\x007S"
_LINKS = b"12"
_EXTENDED = b"LKxXg"
_PLAIN = b"0\0"
_BODILESS = b"123456"  # links, devices, directories, fifos: whatever their size field

# All before the checksum (name and size are in it), the checksum, and the rest, from
# the typeflag on, which members of the same type and owner share.
_FIELDS = Struct("148s8s356s")
_TAIL = 156
# Most endings of names that are cached, and samples that are remembered.
_ENDINGS = 64
_REMEMBERED = 1000
_SLASH, _LOW_LINE = ord("/"), ord("_")
# The last character of a key whose base name is empty: that of a hidden file. Of
# those in folders WebDataset makes samples named "folder/", which nobody wants.
_NO_STEM = frozenset({"", "/"})
StrPath: TypeAlias = str | os.PathLike[str]
# The field for the body of a member (None: to skip it), and the body's size.
_Member: TypeAlias = tuple[str | None, int]
_PIECE = 1 << 20
_NO_SIZE = 1 << 62


class DamageError(Exception):
    """What is damaged, without its place."""


def _is_sound(block: bytes) -> bool:
    """Verify a checksum, of unsigned bytes or, as from old writers, signed ones."""
    try:
        checksum = _read_number(block[148:_TAIL])
    except DamageError:
        return False
    rest = block[:148] + b" " * 8 + block[_TAIL:]
    # In halves, because 256 bytes do not reach the modulus either.
    found = (adler32(rest[:256]) & 0xFFFF) + (adler32(rest[256:]) & 0xFFFF) - 2
    if found == checksum:
        return True
    return found - 256 * sum(byte > 127 for byte in rest) == checksum


@lru_cache(maxsize=16)  # some writers put the same header before each member
def _size_of_pax(block: bytes) -> int | None:
    """Return the size of the records after a PAX header; None if it is invalid."""
    try:
        return _read_extended_size(block) if _is_sound(block) else None
    except DamageError:
        return None


def _read_extended_size(block: bytes) -> int:
    size = _read_number(block[124:136])
    if size > _EXTENDED_BYTES:
        raise DamageError(f"a long name or PAX header of {size:,} bytes, over 1 MiB")
    return size


def _read_size(block: bytes, extras: dict[str, bytes]) -> int:
    digits = extras.get("size")
    if block[_TAIL] in _BODILESS:
        return 0
    if not digits:
        return _read_number(block[124:136])
    if len(digits) > 20 or not digits.isdigit():
        raise DamageError(f"{digits[:20]!r} for a size in a PAX header")
    return int(digits)


def _read_number(field: bytes) -> int:
    """Return a number: octal digits, or base 256 if the top bit is set."""
    try:
        if field[0] & 0x80:
            number = int.from_bytes(field, signed=True)
            # The first of the top two bits marks the base, the second is the sign.
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
    """Return text up to a zero; bytes that are not UTF-8 can be encoded back."""
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _is_silent(records: bytes) -> bool:
    """Return whether PAX records are irrelevant, by a quick search."""
    has_any = b"path=" in records or b"size=" in records or b"GNU.sparse." in records
    return not has_any


def _read_pax(records: bytes) -> dict[str, bytes]:
    """Return the relevant PAX records: path, size, whether the member is sparse."""
    extras: dict[str, bytes] = {}
    at, records = 0, b"" if _is_silent(records) else records.rstrip(b"\0")
    while at < len(records):  # lines of "length key=value"
        space = records.find(b" ", at, at + 20)
        digits = records[at : max(space, at)]
        stop = at + int(digits) if digits.isdigit() else 0
        if stop <= space or records[stop - 1 : stop] != b"\n":
            raise DamageError(f"a broken PAX record at byte {at:,} of its header")
        key, _, value = records[space + 1 : stop - 1].partition(b"=")
        if key == b"size":
            extras["size"] = value
        elif key in {b"path", b"GNU.sparse.name"}:
            extras["path"] = value
        if key.startswith(b"GNU.sparse."):
            extras["sparse"] = value
        at = stop
    return extras


def split_name(name: str) -> tuple[str, str] | None:
    """Return the key and the field of a member; None if it is of no sample."""
    key, dot, field = name.partition(".")
    if "/" in field:  # the dot is in a folder name
        folder, _, base = name.rpartition("/")
        stem, dot, field = base.partition(".")
        key = f"{folder}/{stem}"
    if not dot or key[-1:] in _NO_STEM:
        return None
    # The first part of a path like ``__meta__``.
    top = name.partition("/")[0]
    if len(top) >= 4 and top.startswith("__") and top.endswith("__"):
        return None
    return key, field.lower()


def samples(max_sample_bytes: int, missing_end: MissingEnd, feed: ByteFeed) -> Steps:
    """Yield an archive's samples; ``FailedSample`` for a damaged one, or for the rest.

    A member takes twice its size while it is assembled from pieces. ``feed`` starts at
    a header of a sample; global PAX headers before it are not applied.
    """
    return _Archive(max_sample_bytes, missing_end, feed).read()


class _Archive:
    """One archive, and the sample whose members are being read."""

    def __init__(
        self, max_sample_bytes: int, missing_end: MissingEnd, feed: ByteFeed
    ) -> None:
        self._feed, self._url = feed, feed.url
        self._max_bytes, self._missing_end = max_sample_bytes, missing_end
        # Samples, or failures in their place.
        self._ready: list[Any] = []
        # The sample being collected: its key, where it starts, what it has, how many
        # more bytes it may have, and why it failed.
        self._key: str | None = None
        self._start = self._room = 0
        self._fields: dict[str, Any] = {}
        self._bad: FailedSample | None = None
        # The last member, and the last header read: one of the member that follows.
        self._last, self._at = b"", feed.at
        self._globals: dict[str, bytes] = {}
        # The rest of the last plain header, and its sum; the key as bytes, if known;
        # fields by the part of a name after the first dot.
        self._tail, self._tail_sum = b"", 0
        self._stem: bytes | None = None
        self._endings: dict[bytes, str] = {}
        # What the first samples have, by their keys.
        self._known: dict[str, frozenset[str]] = {}

    @property
    def _name(self) -> str:
        return _read_text(self._last)

    def only(self, url: str, start: int, data: memoryview) -> Any:
        """Return the only sample in these bytes, if its headers are plain.

        Or else NotImplemented. What is known of headers is that of samples before.
        """
        feed, self._url = self._feed, url
        feed.restart(start, data)
        self._key = self._stem = self._bad = None
        member = self._read_plain_ones()
        if self._ready or member is not None or feed.used < len(feed.view):
            self._ready = []
            return NotImplemented
        return NotImplemented if self._key is None else self._bad or self._fields

    def read(self) -> Steps:
        error: DatasetError | None = None
        yield None  # the first piece, so that its first member takes the fast path too
        try:
            yield from self._read_members()
        except DamageError as damage:
            after = (
                f"after member {self._name!r}" if self._name else "the first one read"
            )
            text = f"{self._url!r} is damaged at byte {self._at:,}, {after}: {damage}"
            error = DatasetError(text + self._loss(), location=self._url)
        except DatasetError as cut:
            error = cut
        if error is not None:
            if self._bad is not None:  # it keeps its own error
                self._end_sample()
            self._ready.append(FailedSample(error, ends=True))
        if self._ready:
            yield self._ready, self._at

    def _read_members(self) -> Steps:
        while True:
            member = None if self._globals else self._read_plain_ones()
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

    def _read_plain_ones(self) -> _Member | None:
        """Read all; return the next member if only its body is not whole here."""
        feed, view, at = self._feed, self._feed.view, self._feed.used
        base, length, ready, want = feed.at - at, len(view), self._ready, feed.want
        start, name, member = at, b"", None
        while (body := at + _BLOCK) <= length and len(ready) < want:
            head, checksum, tail = _FIELDS.unpack_from(view, at)
            if tail != self._tail:
                block = bytes(view[at:body])
                if block[_TAIL] == _PAX and (following := self._pass_pax(block, body)):
                    at = following
                    continue
                if not self._learn(block):
                    break
            try:
                size = int(head[124:136].rstrip(b"\0 "), 8)
                expected = int(checksum.rstrip(b"\0 "), 8)
            except ValueError:
                break
            # The low half of an Adler sum is 1 and the sum of the bytes, modulo 65521,
            # which 148 bytes do not reach: exact, and much faster than `sum`.
            if (adler32(head) & 0xFFFF) + self._tail_sum != expected or size < 0:
                break
            name = head[:100]
            field = self._place(name, size, base + start)
            start = at = (stop := body + size) + (-size & 511)
            if at > length:
                start, member = body, (field, size)
                break
            if field is not None:
                self._fields[field] = view[body:stop].tobytes()
        self._last = name or self._last
        feed.used = start
        return member

    def _pass_pax(self, block: bytes, body: int) -> int:
        """Return where a PAX header ends; 0 if it is relevant, or not whole here."""
        size = _size_of_pax(block)
        if size is None:
            return 0
        view = self._feed.view
        following = (stop := body + size) + (-size & 511)
        is_whole = following <= len(view) and _is_silent(bytes(view[body:stop]))
        return following if is_whole else 0

    def _learn(self, block: bytes) -> bool:
        """Keep the rest of a header if it is plain, and its share of the checksum."""
        is_plain = block[_TAIL] in _PLAIN and not block[345]
        if is_plain:
            self._tail = block[_TAIL:]
            # 255: eight spaces in place of the checksum, less the 1 of an Adler sum.
            self._tail_sum = sum(self._tail.translate(None, b"\0")) + 255
        return is_plain

    def _read_headers(self) -> Generator[Any, None, _Member | None]:
        """Read the headers of one member; None at the end of the archive."""
        start, extras = self._feed.at, dict[str, bytes]()
        while True:
            block = yield from self._read_header(start)
            if block is None or (kind := block[_TAIL]) not in _EXTENDED:
                break
            owner = "the long name or PAX header of a member"
            data = yield from self._read_body(owner, _read_extended_size(block))
            if kind == _LONG_NAME:
                extras["path"] = data
            elif kind == _GLOBAL:
                self._globals.update(_read_pax(data))
                # Unlike the others it may be alone, after the last member.
                start = self._feed.at if start == self._at else start
            elif kind in _PAX_KINDS:
                extras.update(_read_pax(data))
        if block is None:
            return None
        extras = {**self._globals, **extras}
        name, size = extras.get("path") or _read_name(block), _read_size(block, extras)
        self._last, field = name, None
        if kind in _LINKS:
            _mention(_LINKED, self._url, self._name)
        elif kind in _REGULAR:
            field = self._place(name, size, start)
        if field is not None and (kind == _SPARSE or "sparse" in extras):
            self._spoil(name, "is sparse, which is not supported")
            field = None
        yield from self._skip_map(block)
        return field, size

    def _read_header(self, start: int) -> Generator[Any, None, bytes | None]:
        """Read a header of the member that starts at ``start``; None at the end."""
        self._at = self._feed.at
        block = yield from self._feed.take(_BLOCK)
        if len(block) < _BLOCK or block == _ZEROS:
            yield from self._read_end(block, is_between=start == self._at)
            return None
        if not _is_sound(block):
            hint = "" if self._name else "; is it a tar archive, and not compressed?"
            raise DamageError(f"no header, or one with a wrong checksum{hint}")
        return block

    def _skip_map(self, block: bytes) -> Steps:
        """Skip the rest of a sparse member's map, which its size excludes."""
        has_more = block[_TAIL] == _SPARSE and block[482]
        while has_more:
            block = yield from self._feed.take(_BLOCK)
            if len(block) < _BLOCK:
                raise self._cut_header(len(block))
            has_more = block[504]

    def _read_body(
        self, owner: str, size: int, *, is_kept: bool = True
    ) -> Generator[None, None, bytes]:
        """Return a body, and skip its padding, or all if it is not to be kept."""
        feed, begin, data = self._feed, self._feed.at, b""
        padded = size + (-size & 511)
        if is_kept:
            data = yield from feed.take(size)
        missing = yield from feed.skip(padded - len(data))
        if missing:
            received = padded - missing
            expected = size if received < size else padded
            raise self._cut(owner, begin, expected, received)
        return data

    def _read_end(self, block: bytes, *, is_between: bool) -> Steps:
        """Read what follows the last member, from its first block on."""
        feed = self._feed
        if len(block) < _BLOCK:
            if block or not is_between:
                raise self._cut_header(len(block))
            self._check_missing_end()
            self._end_sample()
            return
        if not is_between:
            raise DamageError("zeros where a member must follow its long name")
        block = yield from feed.take(_BLOCK)
        if 0 < len(block) < _BLOCK:
            raise self._cut_header(len(block))
        if block.strip(b"\0"):
            raise DamageError("a lone block of zeros")
        self._end_sample()
        ready, self._ready = self._ready, []
        yield ready, self._at
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
        why = "was cut short, or its writer leaves them out (missing_end='warn')"
        raise TruncatedReadError(
            f"{self._url!r} stops at byte {total:,} without the zeros at the end of a "
            f"tar archive: it {why if total else 'is empty'}{self._loss()}",
            location=self._url,
            expected=total + 2 * _BLOCK,
            received=total,
        )

    def _cut_header(self, received: int) -> TruncatedReadError:
        what = f"the header after member {self._name!r}"
        if not self._name:
            what = "its first header (is it a tar archive, and not compressed?)"
        return self._cut(what, self._feed.at - received, _BLOCK, received)

    def _cut(
        self, what: str, begin: int, expected: int, received: int
    ) -> TruncatedReadError:
        return TruncatedReadError(
            f"{self._url!r} ends within {what}: {received:,} of {expected:,} bytes at "
            f"byte {begin:,}{self._loss()}",
            location=self._url,
            expected=expected,
            received=received,
        )

    def _loss(self) -> str:
        """Return the end of a message, which names the sample lost with the rest."""
        todo = "; write or download it again"
        if self._key is None or self._bad is not None:
            return todo
        return f"; sample {self._key!r} at byte {self._start:,} is lost{todo}"

    def _place(self, name: bytes, size: int, start: int) -> str | None:
        """Return the field for a member's body; None to skip it.

        A member of another sample than the previous one ends that. Names like previous
        ones are split faster: the ending is known, and nothing else is special.
        """
        stem, dot, ending = name.partition(b".")
        field, known = self._endings.get(ending) if dot else None, None
        if field is None or stem != self._stem:
            is_plain = field is not None and stem and 0 not in stem
            if is_plain and stem[-1] != _SLASH and stem[0] != _LOW_LINE:
                key, known = stem.decode("utf-8", "surrogateescape"), stem
            elif split := split_name(_read_text(name)):
                key, field = split
                if dot and b"\0" not in stem and b"/" not in ending:
                    if len(self._endings) >= _ENDINGS:
                        self._endings.clear()
                    self._endings[ending] = field
            else:
                return None
            if key != self._key:
                self._end_sample()
                self._key, self._start, self._room = key, start, self._max_bytes
                self._fields = {"__key__": key, "__url__": self._url}
            self._stem = known
        assert field is not None
        self._room -= size
        if self._bad is not None:
            return None
        if field in self._fields:
            self._spoil(name, f"is the second one for the field {field!r}")
        elif self._room < 0:
            what = "which makes the sample larger than max_sample_bytes"
            self._spoil(name, f"has {size:,} bytes, {what} ({self._max_bytes:,})")
        return None if self._bad else field

    def _end_sample(self) -> None:
        """Add the sample to those that are ready; log it if its key came before."""
        key, fields = self._key, self._fields
        if key is None:
            return
        self._ready.append(self._bad or fields)
        known = self._known.get(key)
        if known is None:
            if len(self._known) < _REMEMBERED:
                self._known[key] = frozenset(fields)
        elif len(known & fields.keys()) == 2:  # __key__ and __url__
            _mention(_APART, self._url, key, f"{self._start:,}")
        self._key = self._bad = None

    def _spoil(self, name: bytes, what: str) -> None:
        """Replace the sample with an error, and skip the rest of it."""
        text = f"{self._url!r}: sample {self._key!r} at byte {self._start:,} "
        text += f"cannot be read: its member {_read_text(name)!r} {what}"
        self._bad = FailedSample(DatasetError(text, location=self._url))
        self._fields = {}


class _SingleSamples:
    """Makes single samples, in any thread; its archives know headers seen before."""

    def __init__(self, max_sample_bytes: int, missing_end: MissingEnd) -> None:
        self._args = max_sample_bytes, missing_end
        self._free: list[_Archive] = []

    def __call__(self, url: str, start: int, data: memoryview) -> Any:
        try:
            archive = self._free.pop()
        except IndexError:  # all are at work
            archive = _Archive(*self._args, ByteFeed(url, start, is_part=True))
        sample = archive.only(url, start, data)
        self._free.append(archive)
        return sample

    def __reduce__(self) -> tuple[Any, ...]:
        return _SingleSamples, self._args


# A sample may lack a field because of these.
_LINKED = (
    "%r: member %r is a link, and links are skipped: the archive does not hold what "
    "they lead to; pack with `tar --dereference --hard-dereference`"
)
_APART = (
    "%r: sample %r at byte %s has other fields than an earlier sample of that key, and "
    "both are incomplete if they are one: its members must be next to each other; pack "
    "with `tar --sort=name`"
)


def _mention(text: str, url: str, *about: object) -> None:
    """Log what is the matter with an archive, for the first one of the process."""
    if text not in _MENTIONED:
        _MENTIONED.append(text)
        _LOG.warning(text, url, *about)


_MENTIONED: list[str] = []


async def at_samples(
    storage: Storage, address: Address, size: int, count: int
) -> Sequence[int] | str:
    """Return where samples start, as ``Cuts`` does: from the archive's index."""
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
    make one sample: ``{"__key__": ..., "__url__": ..., "jpg": b"...", "cls": b"7"}``,
    with bytes owned by the caller. Links are skipped, and the first is logged; so is a
    sample whose members are not next to each other. Plain, gzip, zstandard, bzip2, xz;
    a plain tar can resume at any sample, reading at most 8 MB of earlier data again. If
    there are fewer shards than readers, ``a.tar`` is split by its index ``a.tar.idx``.

    Args:
        addresses: Paths or URLs, such as ``"s3://bucket/train-{000..127}.tar"``.
        max_sample_bytes: Larger samples fail, and are not held in memory.
        missing_end: A tar without the zeros at its end was cut short, which is an
            ``"error"``, and its last sample is lost. With ``"warn"``, for writers that
            leave them out, it is read to where it stops.
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
        >>> async def first():
        ...     async for sample in TarDataset(path):
        ...         return sample["txt"]
        >>> asyncio.run(first())
        b'hi'
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
        super().__init__(addresses, kind, **options)


def write_index(path: StrPath, index: StrPath | None = None) -> int:
    """Write the index of a tar archive on disk, completely or not at all.

    Args:
        path: The archive, not compressed.
        index: The file to write; default: ``path`` plus ``.idx``.

    Returns:
        The number of samples.

    Raises:
        DatasetError: If a sample of the archive cannot be read.
        OSError: If it cannot be read or the index cannot be written.
    """
    path = os.fspath(path)
    target = Path(os.fspath(index) if index is not None else index_name(path))
    with Path(path).open("rb", buffering=0) as file:
        read = partial(file.read, _PIECE)
        numbers = scanned(
            ByteFormatSpec(partial(samples, _NO_SIZE, "warn")), path, read
        )
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(index_bytes(numbers))
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return len(numbers) - 1
