"""The guard of shards: which version of one is read, and which one is expected.

A shard is read at one version: what a listing, a cut or a first answer has shown, the
rest must agree with. A state holds the versions of the shards that are open in it.
"""

import functools
import os
import stat
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

from typing_extensions import Buffer

from aioloader.errors import DatasetError, ShardChangedError, TruncatedReadError


class Version(NamedTuple):
    """The version of an object or file.

    Attributes:
        size: Length of the whole object, in bytes.
        e_tag: What changes with the bytes, if the server has it: an entity tag, or a
            checksum. One that starts with ``W/`` is weak: not every change shows.
        modified: Modification time, in seconds, if it is known.
    """

    size: int
    e_tag: str | None = None
    modified: float | None = None

    @property
    def strong(self) -> str | None:
        """The tag, if it identifies every byte: for conditional requests."""
        return None if (self.e_tag or "W/").startswith("W/") else self.e_tag

    @property
    def is_marked(self) -> bool:
        """Whether a change of the bytes shows, besides a change of their number."""
        return bool(self.e_tag) or self.modified is not None

    def is_of(self, other: "Version") -> bool:
        """Return whether both have the same bytes, as far as the server shows."""
        if self.size != other.size:
            return False
        if self.e_tag and other.e_tag:
            if self.e_tag.removeprefix("W/") != other.e_tag.removeprefix("W/"):
                return False
            if self.strong and other.strong:
                return True
        known = None not in {self.modified, other.modified}
        return not known or self.modified == other.modified


@functools.lru_cache(maxsize=256)
def saved(location: str, version: Version) -> Mapping[str, Any]:
    """Return what a state holds of a version: its size and a stamp, in a few bytes.

    The stamp consists of digests of the place and of what identifies the version
    there: a copy elsewhere has another time, and often another tag.
    """
    if not version.e_tag:
        if not version.modified:
            return {"size": version.size}
        kind, mark = "t", repr(version.modified)
    elif version.strong:
        kind, mark = "e", version.strong
    else:
        kind, mark = "w", f"{version.e_tag} {version.modified}"
    return {"size": version.size, "stamp": f"{_hash(location)}{kind}{_hash(mark)}"}


def _hash(text: str) -> str:
    data = text.encode("utf-8", "surrogateescape")
    return blake2b(data, digest_size=4).hexdigest()


class Piece(NamedTuple):
    """A part of an object, and the version of the whole.

    Attributes:
        data: The bytes, in any buffer.
        version: The version of the object that they are of.
    """

    data: Buffer
    version: Version


class Known(NamedTuple):
    """What is known of a shard before it is opened."""

    version: Version | None = None  # what was listed or cut in this iteration
    size: int | None = None  # its length in the state
    stamp: str | None = None  # its stamp in the state

    @classmethod
    def of(cls, position: Mapping[str, Any], version: Version | None = None) -> "Known":
        """Return what the position in a state says, and this iteration."""
        return cls(version, position.get("size"), position.get("stamp"))

    def check(self, location: str, found: Version, start: int = 0) -> None:
        if self.version is not None and not found.is_of(self.version):
            raise changed(location, self.version, found)
        now = saved(location, found).get("stamp", "") if self.stamp else ""
        if self.size not in {None, found.size}:
            what = f"it had {self.size:,} bytes and has {found.size:,}"
        elif start > found.size:
            what = f"it is to be read from byte {start:,} on and has {found.size:,}"
        elif self.stamp and now[:9] == self.stamp[:9] and now != self.stamp:
            what = (
                f"it has {found.size:,} bytes as before, but another "
                f"{_WORDS[now[8]]}; if it is a copy with the same contents, load the "
                "state with strict=False"
            )
        else:
            return
        raise ShardChangedError(
            f"{location!r} has changed since the state was saved: {what}; resume with "
            "the original shards, or start again",
            location=location,
        )


# Opened with it, a pipe does not wait for its other end.
NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
_WORDS = {"e": "ETag", "w": "ETag or date", "t": "modification time"}
NOTHING = Known()


def changed(location: str, before: Version, now: Version) -> DatasetError:
    what = f"it had {before.size:,} bytes and has {now.size:,}"
    if before.size == now.size:
        what = f"it has {now.size:,} bytes as before, but another ETag or date"
    text = (
        f"{location!r} changed while being read: {what}; write shards under another "
        "name and rename them"
    )
    if now.size >= before.size:
        return DatasetError(text, location=location)
    return TruncatedReadError(
        text, location=location, expected=before.size, received=now.size
    )


def opener(path: str, flags: int) -> int:
    """Open as ``open`` does; an OSError if the size is not how many bytes it has."""
    file = os.open(path, flags | NO_WAIT)
    try:
        _check_size(file)
    except BaseException:
        os.close(file)
        raise
    return file


def _check_size(file: int) -> None:
    facts = os.fstat(file)
    check_is_file(facts)
    if not facts.st_size and os.read(file, 1):
        raise OSError(
            "its size is 0, but it has bytes, as files in /proc: copy it to a disk"
        )


def check_is_file(facts: os.stat_result) -> None:
    if kind := _KINDS.get(stat.S_IFMT(facts.st_mode)):
        raise OSError(f"it is {kind}, not a file: save what it gives to a file")


def version_of_file(file: int | str) -> Version:
    facts = os.fstat(file) if isinstance(file, int) else os.stat(file)  # noqa: PTH116
    return Version(facts.st_size, None, facts.st_mtime)
