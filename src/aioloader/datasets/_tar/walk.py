"""Reads tar archives: consecutive members with the same key make one sample.

Members with a plain header that lies whole in a piece take a fast path, all others are
read step by step. Damage ends the archive; it is not detected in bodies, long names and
PAX headers, which have no checksum. An archive ends with zeros: a single block of them
is enough, and only zeros may follow.
"""

import logging
from collections.abc import Generator
from typing import Any, TypeAlias

from aioloader._observe.warnings import warn
from aioloader._order.blocks import Bad
from aioloader.datasets._engine import Feed, Steps
from aioloader.datasets._streams.shards import MissingEnd
from aioloader.datasets._tar.headers import (
    BLOCK_BYTES,
    EXTENDED,
    FIELDS,
    GLOBAL,
    LINKS,
    LONG_NAME,
    PAX,
    PAX_KINDS,
    REGULAR,
    SPARSE,
    ZEROS,
    DamageError,
    is_silent,
    is_sound,
    read_extended_size,
    read_member,
    read_pax,
    read_plain,
    read_text,
    size_of_pax,
    split_name,
    sum_plain,
)
from aioloader.errors import DatasetError, TruncatedReadError

_LOG = logging.getLogger("aioloader")
# Most endings of names that are cached.
_ENDINGS = 64
_SLASH, _LOW_LINE = ord("/"), ord("_")
# The field for the body of a member (None: to skip it), and the body's size.
_Member: TypeAlias = tuple[str | None, int]


def samples(max_sample_bytes: int, missing_end: MissingEnd, feed: Feed) -> Steps:
    """Yield the samples of an archive.

    Args:
        max_sample_bytes: Largest total size of one sample's members. A member takes
            twice its size while it is assembled from pieces.
        missing_end: What a missing end is: an ``"error"``, or a reason to ``"warn"``.
        feed: The bytes, from the first header of a sample on. Global PAX headers
            before it are not applied.
    """
    return _Archive(max_sample_bytes, missing_end, feed).read()


class _Archive:
    """One archive, and the sample whose members are being read."""

    def __init__(
        self, max_sample_bytes: int, missing_end: MissingEnd, feed: Feed
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
        self._bad: Bad | None = None
        # The last member, and the last header read: one of the member that follows.
        self._name, self._at = "", feed.at
        self._globals: dict[str, bytes] = {}
        # The tail of the last plain header, and its sum; the key as bytes, if known;
        # fields by the part of a name after the first dot.
        self._tail, self._tail_sum = b"", 0
        self._stem: bytes | None = None
        self._endings: dict[bytes, str] = {}

    def read(self) -> Steps:
        """Yield samples, and a ``Bad`` for each that fails, or for the damaged rest.

        A sample fails if it is too large, or has a sparse member or a duplicate field.
        """
        try:
            yield from self._read_members()
        except DamageError as damage:
            after = (
                f"after member {self._name!r}" if self._name else "the first one read"
            )
            text = f"{self._url!r} is damaged at byte {self._at:,}, {after}: {damage}"
            self._give_up(DatasetError(text + self._loss(), location=self._url))
        except DatasetError as error:
            self._give_up(error)
        if self._ready:
            yield self._ready, self._at

    def _taken(self) -> tuple[list[Any], int]:
        """Return the samples that are ready, and where the next one starts."""
        ready, self._ready = self._ready, []
        return ready, self._feed.at if self._key is None else self._start

    # -- members --------------------------------------------------------------------

    def _read_members(self) -> Steps:
        while True:
            member = None if self._globals else self._read_plain()
            if member is None and not self._ready:
                member = yield from self._read_headers()
                if member is None:
                    return
            if self._ready:
                yield self._taken()
            if member is not None:
                field, size = member
                owner = f"member {self._name!r}"
                body = yield from self._read_body(
                    owner, size, is_kept=field is not None
                )
                if field is not None:
                    self._fields[field] = body

    def _read_plain(self) -> _Member | None:
        """Read members that are whole in the piece and have a plain header.

        Returns:
            The next one, without its body, if that is not whole here; None if its
            header is not, or not plain: it is left unread.
        """
        feed, view, at = self._feed, self._feed.view, self._feed.used
        base, length, ready, want = feed.at - at, len(view), self._ready, feed.want
        start, name, member = at, b"", None
        while (body := at + BLOCK_BYTES) <= length and len(ready) < want:
            fields = FIELDS.unpack_from(view, at)
            if fields[3] != self._tail:
                block = bytes(view[at:body])
                if block[156] == PAX and (following := self._pass_pax(block, body)):
                    at = following
                    continue
                if not self._learn(block):
                    break
            size = read_plain(view[at : at + 148], fields, self._tail_sum)
            if size < 0:
                break
            name = fields[0]
            field = self._place_plain(name, size, base + start)
            start = at = (stop := body + size) + (-size & 511)
            if at > length:
                start, member = body, (field, size)
                break
            if field is not None:
                self._fields[field] = bytes(view[body:stop])
        if name:
            self._name = read_text(name)
        feed.used = start
        return member

    def _pass_pax(self, block: bytes, body: int) -> int:
        """Return where a PAX header ends; 0 if it is relevant, or not whole here."""
        size = size_of_pax(block)
        if size is None:
            return 0
        view = self._feed.view
        following = (stop := body + size) + (-size & 511)
        if following > len(view) or not is_silent(bytes(view[body:stop])):
            return 0
        return following

    def _learn(self, block: bytes) -> bool:
        """Keep the tail of a header if it is plain; return whether it is."""
        tail_sum = sum_plain(block)
        if tail_sum is None:
            return False
        self._tail, self._tail_sum = block[156:], tail_sum
        return True

    def _read_headers(self) -> Generator[Any, None, _Member | None]:
        """Read the headers of a member of any kind; None at the end of the archive."""
        feed, start, extras = self._feed, self._feed.at, dict[str, bytes]()
        while True:
            self._at = feed.at
            block = yield from feed.read(BLOCK_BYTES)
            if len(block) < BLOCK_BYTES or block == ZEROS:
                yield from self._read_end(block, is_between=start == self._at)
                return None
            if not is_sound(block):
                what = "no header, or one with a wrong checksum"
                hint = "; is it a tar archive, and not compressed?"
                raise DamageError(what if self._name else what + hint)
            if (kind := block[156]) not in EXTENDED:
                break
            size = read_extended_size(block)
            owner = "the long name or PAX header of a member"
            data = yield from self._read_body(owner, size)
            if kind == LONG_NAME:
                extras["path"] = data
            elif kind == GLOBAL:
                self._globals.update(read_pax(data))
                # Unlike the others it may be alone, after the last member.
                start = feed.at if start == self._at else start
            elif kind in PAX_KINDS:
                extras.update(read_pax(data))
        extras = {**self._globals, **extras}
        self._name, size = read_member(block, extras)
        field = self._field_of(block, extras, size, start)
        yield from self._skip_map(block)
        return field, size

    def _skip_map(self, block: bytes) -> Steps:
        """Skip the rest of a sparse member's map, which its size excludes."""
        has_more = block[156] == SPARSE and block[482]
        while has_more:
            block = yield from self._feed.read(BLOCK_BYTES)
            if len(block) < BLOCK_BYTES:
                raise self._cut_header(len(block))
            has_more = block[504]

    def _field_of(
        self, block: bytes, extras: dict[str, bytes], size: int, start: int
    ) -> str | None:
        """Return the field for a member's body; None to skip it."""
        kind, field = block[156], None
        if kind in LINKS:
            _mention_links(self._url, self._name)
        elif kind in REGULAR:
            field = self._place(self._name, size, start)
        if field is not None and (kind == SPARSE or "sparse" in extras):
            self._spoil(self._name, "is sparse, which is not supported")
            return None
        return field

    def _read_body(
        self, owner: str, size: int, *, is_kept: bool = True
    ) -> Generator[None, None, bytes]:
        """Return a body after its padding; skip it if it is not to be kept."""
        feed, begin, data = self._feed, self._feed.at, b""
        padded = size + (-size & 511)
        if is_kept:
            data = yield from feed.read(size)
        missing = yield from feed.skip(padded - len(data))
        if missing:
            received = padded - missing
            expected = size if received < size else padded
            raise self._cut(owner, begin, expected, received)
        return data

    # -- the end --------------------------------------------------------------------

    def _read_end(self, block: bytes, *, is_between: bool) -> Steps:
        """Read what follows the last member, from its first block on."""
        feed = self._feed
        if len(block) < BLOCK_BYTES:
            if block or not is_between:
                raise self._cut_header(len(block))
            self._check_missing_end()
            self._end_sample()
            return
        if not is_between:
            raise DamageError("zeros where a member must follow its long name")
        block = yield from feed.read(BLOCK_BYTES)
        if 0 < len(block) < BLOCK_BYTES:
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
        """Check that the archive may end without zeros.

        Raises:
            TruncatedReadError: If not.
        """
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
            expected=total + 2 * BLOCK_BYTES,
            received=total,
        )

    def _cut_header(self, received: int) -> TruncatedReadError:
        what, begin = (
            f"the header after member {self._name!r}",
            self._feed.at - received,
        )
        return self._cut(what, begin, BLOCK_BYTES, received)

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
        """Return the part of a message that names the sample lost with the rest."""
        if self._key is None or self._bad is not None:
            return ""
        return f"; sample {self._key!r} at byte {self._start:,} is lost"

    def _give_up(self, error: DatasetError) -> None:
        """Replace the rest of the archive, and the current sample, with ``error``.

        A sample that has already failed keeps its own error.
        """
        if self._bad is not None:
            self._end_sample()
        self._ready.append(Bad(error))

    # -- samples --------------------------------------------------------------------

    def _place_plain(self, name: bytes, size: int, start: int) -> str | None:
        """Like ``_place``, but faster where a name is like the previous ones.

        Args:
            name: As in a header, padded with zeros.
            size: As for ``_place``.
            start: As for ``_place``.
        """
        stem, dot, ending = name.partition(b".")
        field = self._endings.get(ending)
        if field is None:
            if dot and b"\0" not in stem and b"/" not in ending:
                if len(self._endings) >= _ENDINGS:
                    self._endings.clear()
                self._endings[ending] = read_text(ending).lower()
            return self._place(read_text(name), size, start)
        if stem != self._stem:
            if not stem or 0 in stem or stem[-1] == _SLASH or stem[0] == _LOW_LINE:
                return self._place(read_text(name), size, start)
            self._begin(stem.decode("utf-8", "surrogateescape"), start)
            self._stem = stem
        return self._admit(name, size, field)

    def _place(self, name: str, size: int, start: int) -> str | None:
        """Find the sample of a member, and end the previous one if it differs.

        Args:
            name: Path of the member.
            size: Size of its body, in bytes.
            start: Where its first header starts.

        Returns:
            The field for its body; None to skip it.
        """
        split = split_name(name)
        if split is None:
            return None
        self._begin(split[0], start)
        return self._admit(name, size, split[1])

    def _begin(self, key: str, start: int) -> None:
        """Start the next sample, unless the current one has the same key."""
        if key != self._key:
            self._end_sample()
            self._key, self._start, self._room = key, start, self._max_bytes
            self._fields = {"__key__": key, "__url__": self._url}

    def _end_sample(self) -> None:
        if self._key is not None:
            self._ready.append(self._bad or self._fields)
            self._key = self._bad = self._stem = None

    def _admit(self, name: str | bytes, size: int, field: str) -> str | None:
        """Return the field for a member's body, unless the sample fails, or has."""
        self._room -= size
        if self._bad is None and field in self._fields:
            self._spoil(name, f"is the second one for the field {field!r}")
        elif self._bad is None and self._room < 0:
            self._spoil(
                name,
                f"has {size:,} bytes, which makes the sample larger than "
                f"max_sample_bytes ({self._max_bytes:,})",
            )
        return field if self._bad is None else None

    def _spoil(self, name: str | bytes, what: str) -> None:
        """Replace the sample with an error, and skip the rest of it."""
        name = read_text(name) if isinstance(name, bytes) else name
        text = f"{self._url!r}: sample {self._key!r} at byte {self._start:,} "
        text += f"cannot be read: its member {name!r} {what}"
        self._bad = Bad(DatasetError(text, location=self._url))
        self._fields = {}


def _mention_links(url: str, name: str) -> None:
    """Log the first link of the process: a sample may lack a field because of it."""
    if not _MENTIONED:
        _MENTIONED.append(name)
        _LOG.warning(
            "%r: member %r is a link, and links are skipped: the archive does not hold "
            "what they lead to; pack with `tar --dereference --hard-dereference`",
            url,
            name,
        )


_MENTIONED: list[str] = []
