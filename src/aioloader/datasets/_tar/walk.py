"""Parses a tar archive: bytes in any pieces to samples, without I/O.

Samples come in the order of the archive. After the next ``feed``, only unfinished data
of a piece is kept: one sample, one header. Members with a plain header that lie whole
in a piece take a fast path (``_run``), all others are read step by step.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

from typing_extensions import Buffer

from aioloader._observe.warnings import warn
from aioloader.datasets._streams.shards import MarksEnd, MissingEnd
from aioloader.datasets._tar.groups import Groups
from aioloader.datasets._tar.headers import (
    BLOCK_BYTES,
    EXTENDED,
    FIELDS,
    LINKS,
    PAX,
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
    sum_plain,
)
from aioloader.errors import DatasetError, TruncatedReadError

_LOG = logging.getLogger("aioloader")
_Handler: TypeAlias = Callable[["TarParser", bytes], None]


class TarParser(MarksEnd):
    """Makes samples from the bytes of one tar archive.

    A sample is a dict: ``__key__`` (path up to the first dot of the base name),
    ``__url__``, and the bytes of each member under the rest of its name, in lower case.
    Members that are no regular file, whose base name has a leading dot or none, or that
    are in a top folder like ``__meta__``, are skipped; the first link is logged. Damage
    ends the archive; it is not detected in bodies, long names and PAX headers, which
    have no checksum. An archive ends with zeros; one that just stops was cut short,
    unless its writer leaves them out. A single block of zeros is enough; only zeros
    may follow.

    Args:
        url: Name of the shard, for samples and errors; without credentials.
        max_sample_bytes: Largest total size of one sample's members. A member takes
            twice its size while it is assembled from pieces.
        offset: An ``offset`` of another parser of the archive, where the fed bytes
            start. Global PAX headers before it are not applied.
        missing_end: What a missing end is: an ``"error"``, or a reason to ``"warn"``.

    Attributes:
        offset: Where the first header of the next sample from ``take`` starts; at the
            end where the zeros start, or the damage.
        is_over: Nothing more will come: the bytes have ended, or are damaged.
    """

    def __init__(
        self,
        url: str,
        *,
        max_sample_bytes: int = 1 << 28,
        offset: int = 0,
        missing_end: MissingEnd = "error",
    ) -> None:
        self.offset = offset
        self.is_over = False
        self._url = url
        self._missing_end = missing_end
        self._groups = Groups(url, max_sample_bytes)
        # The piece, its offset in the archive, the position in it, and kept bytes.
        self._view = memoryview(b"")
        self._base, self._pos = offset, 0
        self._parts: list[bytes] = []
        self._have = 0
        self._is_ended = self._is_stopped = False
        # How many bytes are read next, and by which method.
        self._need = BLOCK_BYTES
        self._then: _Handler = TarParser._on_header
        # The header read next, the first one of its member, and the member before.
        self._at = self._from = offset
        self._name = ""
        # The tail of the last plain header, and its sum.
        self._tail, self._tail_sum = b"", 0
        # Values from extended headers for the next member, and from global ones.
        self._extras: dict[str, bytes] = {}
        self._globals: dict[str, bytes] = {}
        # The body of the last header: its member, position, length and field.
        self._owner, self._begin, self._size, self._field = "", offset, 0, ""

    def feed(self, piece: Buffer) -> None:
        """Add bytes; bytes left of the last piece are read first.

        Args:
            piece: Stays valid and unchanged until ``take`` returns fewer samples than
                requested.
        """
        self._walk(sys.maxsize)
        if self._is_stopped:
            return
        self._view = memoryview(piece).cast("B")

    def end(self) -> None:
        """Note that there are no more bytes."""
        self._is_ended = True

    def take(self, limit: int) -> list[Any]:
        """Return the next samples.

        Args:
            limit: Most samples to return, at least 1.

        Returns:
            Dicts; a ``Bad`` for a sample that is too large, or has a sparse member or a
            duplicate field, and for damage. Fewer than ``limit`` only if more bytes are
            needed, or nothing more will come.
        """
        self._walk(limit)
        groups = self._groups
        taken = groups.take(limit)
        if groups.ready:
            self.offset = groups.starts[0]
        else:
            self.offset = self._from if groups.key is None else groups.start
        self.is_over = self._is_stopped and not groups.ready
        return taken

    def _walk(self, limit: int) -> None:
        """Parse until ``limit`` samples are ready, or more bytes are needed."""
        while not self._is_stopped:
            is_plain = not (self._have or self._extras or self._globals)
            if is_plain and self._then is TarParser._on_header:
                self._run(limit)
            if len(self._groups.ready) >= limit:
                return
            if not self._step():
                self._keep()
                if self._is_ended:
                    self._finish()
                return

    def _keep(self) -> None:
        """Copy the rest of the piece, and release it."""
        view = self._view
        if self._pos < len(view):
            self._parts.append(bytes(view[self._pos :]))
            self._have += len(view) - self._pos
            self._pos = len(view)
        self._base += len(view)
        self._pos -= len(view)
        view.release()
        self._view = memoryview(b"")

    def _run(self, limit: int) -> None:
        """Read members that are whole in the piece and have a plain header.

        The first other member is left to ``_step``, with its header unread.
        """
        view, pos, start, base = self._view, self._pos, self._from, self._base
        groups, ready, length = self._groups, self._groups.ready, len(view)
        name = b""
        while (body := pos + BLOCK_BYTES) <= length and len(ready) < limit:
            fields = FIELDS.unpack_from(view, pos)
            if fields[3] != self._tail:
                block = bytes(view[pos:body])
                if block[156] == PAX and (following := self._pass_pax(block, body)):
                    pos = following
                    continue
                if not self._learn(block):
                    break
            size = read_plain(view[pos : pos + 148], fields, self._tail_sum)
            if size < 0:
                break
            following = (stop := body + size) + (-size & 511)
            if following > length:
                break
            name = fields[0]
            field = groups.place_plain(name, size, start)
            if field is not None:
                groups.fields[field] = bytes(view[body:stop])
            pos = following
            start = base + pos
        if name:
            self._name = read_text(name)
        if pos != self._pos:
            self._pos = pos
            self._expect_header()
            self._from = start

    def _pass_pax(self, block: bytes, body: int) -> int:
        """Return where a PAX header ends; 0 if it is relevant, or not whole here."""
        size = size_of_pax(block)
        if size is None:
            return 0
        following = (stop := body + size) + (-size & 511)
        if following > len(self._view) or not is_silent(bytes(self._view[body:stop])):
            return 0
        return following

    def _learn(self, block: bytes) -> bool:
        """Keep the tail of a header if it is plain; return whether it is."""
        tail_sum = sum_plain(block)
        if tail_sum is None:
            return False
        self._tail, self._tail_sum = block[156:], tail_sum
        return True

    def _step(self) -> bool:
        """Read one header or body; return whether the bytes sufficed."""
        stop = self._pos + self._need - self._have
        if stop > len(self._view):
            return False
        data = bytes(self._view[self._pos : stop])
        if self._parts:
            data = b"".join([*self._parts, data])
            self._parts, self._have = [], 0
        self._pos = stop
        self._use(data)
        return True

    def _use(self, data: bytes) -> None:
        """Use the next header, body or padding."""
        try:
            self._then(self, data)
        except DamageError as damage:
            self._break(str(damage))

    def _expect_header(self, *, is_same_member: bool = False) -> None:
        """Expect a header next, of the announced member or of another."""
        self._need, self._then = BLOCK_BYTES, TarParser._on_header
        self._at = self._base + self._pos
        if not is_same_member:
            self._from = self._at

    def _announce(self, owner: str, size: int) -> None:
        """Note which member's body starts here."""
        self._owner, self._begin, self._size = owner, self._base + self._pos, size

    def _on_header(self, block: bytes) -> None:
        if block == ZEROS:
            if self._from != self._at:
                raise DamageError("zeros where a member must follow its long name")
            self._then = TarParser._on_second_zeros
            return
        if not is_sound(block):
            hint = "" if self._name else "; is it a tar archive, and not compressed?"
            raise DamageError(f"no header, or one with a wrong checksum{hint}")
        if block[156] in EXTENDED:
            size = read_extended_size(block)
            self._announce("the long name or PAX header of a member", size)
            self._need, self._then = size, self._EXTENSIONS[block[156]]
        else:
            self._begin_member(block)

    def _on_second_zeros(self, block: bytes) -> None:
        if block != ZEROS:
            raise DamageError("a lone block of zeros")
        self._groups.flush()
        self._then = TarParser._on_padding

    def _on_padding(self, block: bytes) -> None:
        if block.strip(b"\0"):
            raise DamageError(
                "the zeros that end an archive, with other bytes after them; data is "
                "missing there, or archives were joined: join them by `tar -A`"
            )

    def _on_long_name(self, data: bytes) -> None:
        self._extras["path"] = data
        self._end_extended()

    def _on_long_link(self, _: bytes) -> None:
        self._end_extended()

    def _on_pax(self, data: bytes) -> None:
        self._extras.update(read_pax(data))
        self._end_extended()

    def _on_global(self, data: bytes) -> None:
        self._globals.update(read_pax(data))
        # Unlike the others it may be alone, after the last member.
        self._end_extended(is_of_member=self._from != self._at)

    def _end_extended(self, *, is_of_member: bool = True) -> None:
        self._pos += -self._size & 511
        self._expect_header(is_same_member=is_of_member)

    def _begin_member(self, block: bytes) -> None:
        """Read the header of a member, and decide how to treat its body."""
        extras = {**self._globals, **self._extras}
        name, size = read_member(block, extras)
        self._extras, self._name = {}, name
        self._announce(f"member {name!r}", size)
        kind, field = block[156], None
        if kind in REGULAR:
            field = self._groups.place(name, size, self._from)
        elif kind in LINKS:
            _mention_links(self._url, name)
        if field is not None and (kind == SPARSE or "sparse" in extras):
            self._groups.spoil(name, "is sparse, which is not supported")
            field = None
        if kind == SPARSE and block[482]:
            self._then = TarParser._on_sparse_map
        elif field is None:
            self._pass_over()
        else:
            self._field, self._need, self._then = field, size, TarParser._on_body

    def _on_sparse_map(self, block: bytes) -> None:
        """Read one more block of a sparse member's map, which its size excludes."""
        self._announce(self._owner, self._size)
        if not block[504]:
            self._pass_over()

    def _pass_over(self) -> None:
        self._pos += self._size + (-self._size & 511)
        self._expect_header()

    def _on_body(self, data: bytes) -> None:
        self._groups.fields[self._field] = data
        self._pos += -self._size & 511
        self._expect_header()

    def _stop(self) -> None:
        self._is_stopped = True
        self._view.release()
        self._view, self._parts = memoryview(b""), []

    def _break(self, reason: str) -> None:
        """Give up the rest of the archive because of damage at the last header."""
        after = f"after member {self._name!r}" if self._name else "the first one read"
        text = f"{self._url!r} is damaged at byte {self._at:,}, {after}: {reason}"
        self._give_up(DatasetError(text + self._groups.loss(), location=self._url))

    def _finish(self) -> None:
        """Check that the archive may end where the bytes do."""
        if self._then is TarParser._on_padding:
            self._use(b"".join(self._parts))
            self._stop()
            return
        total = self._base + len(self._view)
        received, padded = total - self._begin, self._size + (-self._size & 511)
        if received < padded:
            expected = self._size if received < self._size else padded
            self._cut_short(self._owner, self._begin, expected, received)
            return
        received = self._have + len(self._view) - self._pos
        if received or self._from != self._at or self._then not in self._BETWEEN:
            what = f"the header after member {self._name!r}"
            self._cut_short(what, total - received, BLOCK_BYTES, received)
            return
        is_marked = self.is_part or self._then is TarParser._on_second_zeros
        if not (is_marked or self._may_lack_end(total)):
            return
        self._groups.flush()
        self._stop()

    def _may_lack_end(self, total: int) -> bool:
        """Return whether the archive may end without zeros; if not, give up."""
        if total and self._missing_end == "warn":
            warn(
                f"{self._url!r} stops at byte {total:,} without the zeros at the end "
                "of a tar archive; it is read to there, because of missing_end='warn'"
            )
            return True
        why = "was cut short, or its writer leaves them out (missing_end='warn')"
        why = f"{why if total else 'is empty'}{self._groups.loss()}"
        error = TruncatedReadError(
            f"{self._url!r} stops at byte {total:,} without the zeros at the end of a "
            f"tar archive: it {why}",
            location=self._url,
            expected=total + 2 * BLOCK_BYTES,
            received=total,
        )
        self._give_up(error)
        return False

    def _cut_short(self, what: str, begin: int, expected: int, received: int) -> None:
        """Give up because the bytes end within an item."""
        error = TruncatedReadError(
            f"{self._url!r} ends within {what}: {received:,} of {expected:,} bytes at "
            f"byte {begin:,}{self._groups.loss()}",
            location=self._url,
            expected=expected,
            received=received,
        )
        self._give_up(error)

    def _give_up(self, error: DatasetError) -> None:
        self._groups.give_up(error, self._from)
        self._stop()

    _BETWEEN: ClassVar[tuple[_Handler, ...]] = (_on_header, _on_second_zeros)
    _EXTENSIONS: ClassVar[dict[int, _Handler]] = {
        ord("L"): _on_long_name,
        ord("K"): _on_long_link,
        ord("x"): _on_pax,
        ord("X"): _on_pax,  # Solaris
        ord("g"): _on_global,
    }


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
