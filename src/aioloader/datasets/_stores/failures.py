"""Errors for failed reads, and checks that a shard does not change while it is read.

obstore's exceptions contain whole requests, including secrets. Our errors show only the
exception's type, with fixed phrases and numbers (HTTP status, errno, retries) from its
first line. They are not chained to the exception, because a traceback would print it. A
state contains the version of each open shard.
"""

import errno
import functools
import os
import stat
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import blake2b
from http import HTTPStatus
from http.client import responses
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from typing_extensions import Buffer

from aioloader.datasets._stores.redact import redact_key
from aioloader.errors import (
    DatasetError,
    ObjectNotFoundError,
    ObjectPermissionError,
    ShardChangedError,
    TruncatedReadError,
)

# Phrases of obstore's errors that are safe to show: they contain no data.
_CUT, _NO_RANGES = "request or response body error", "Range request not supported"
_NO_CONNECTION, _CIRCLE = "error sending request", "error following redirect"
_NO_LENGTH = "Content-Length Header missing from response"
_PHRASES = (_CUT, _NO_RANGES, _NO_CONNECTION, _CIRCLE, _NO_LENGTH)
# Parts of the URLs where virtual machines get credentials (AWS, Azure, Google).
_METADATA = ("/latest/api/token", "/metadata/identity", "computeMetadata", "IMDS")
_EPOCH = datetime.fromtimestamp(0, UTC)

# Names of obstore's types, so that this module need not import obstore.
_REFUSED_TYPES = frozenset({"PermissionDeniedError", "UnauthenticatedError"})
_REFUSED_STATUSES = frozenset({400, 401, 403})


class Version(NamedTuple):
    """The version of a stored object or file, by which changes are noticed.

    Attributes:
        size: Length of the whole object, in bytes.
        e_tag: An entity tag or checksum that changes with the bytes; None if the server
            sends none. A tag that starts with ``W/`` is weak: it may miss changes.
        modified: Modification time, in seconds since the epoch, if known.
    """

    size: int
    e_tag: str | None = None
    modified: float | None = None

    @property
    def strong(self) -> str | None:
        """The tag for conditional requests; None if it is weak or missing."""
        return None if (self.e_tag or "W/").startswith("W/") else self.e_tag

    @property
    def is_marked(self) -> bool:
        """Whether a change of the bytes is detectable even if the size is unchanged."""
        return bool(self.e_tag) or self.modified is not None

    def is_of(self, other: "Version") -> bool:
        """Return whether sizes and known tags and dates agree; strong tags suffice."""
        if self.size != other.size:
            return False
        if self.e_tag and other.e_tag:
            if self.e_tag.removeprefix("W/") != other.e_tag.removeprefix("W/"):
                return False
            if self.strong and other.strong:
                return True
        are_dated = None not in {self.modified, other.modified}
        return not are_dated or self.modified == other.modified


@functools.lru_cache(maxsize=256)
def saved(location: str, version: Version) -> Mapping[str, Any]:
    """Return a version for a state, with hashes of the location and the tag or date."""
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
    """The bytes of a range of a stored object, and the version of that object.

    Attributes:
        data: The bytes of the range, in any buffer.
        version: The version of the whole object.
    """

    data: Buffer
    version: Version


class ExpectedVersion(NamedTuple):
    """The known facts about the version that a shard must have when it is opened."""

    version: Version | None = None  # found earlier in this iteration
    size: int | None = None  # in the loaded state
    stamp: str | None = None  # in the loaded state

    @classmethod
    def of(
        cls, position: Mapping[str, Any], version: Version | None = None
    ) -> "ExpectedVersion":
        return cls(version, position.get("size"), position.get("stamp"))

    def check(self, location: str, current: Version, start: int = 0) -> None:
        """Raise if ``current`` differs from these facts, or ends before ``start``."""
        if self.version is not None and not current.is_of(self.version):
            raise changed(location, self.version, current)
        now = saved(location, current).get("stamp", "") if self.stamp else ""
        if self.size not in {None, current.size}:
            change = f"it had {self.size:,} bytes and has {current.size:,}"
        elif start > current.size:
            change = f"it is to be read from byte {start:,} on and has {current.size:,}"
        elif self.stamp and now[:9] == self.stamp[:9] and now != self.stamp:
            change = (
                f"it has {current.size:,} bytes as before, but another "
                f"{_MARKS[now[8]]}; if it is a copy with the same contents, load the "
                "state with strict=False"
            )
        else:
            return
        raise ShardChangedError(
            f"{location!r} has changed since the state was saved: {change}; resume "
            "with the original shards, or start again",
            location=location,
        )


# With this flag, opening a pipe does not wait for a process at the other end.
NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
_MARKS = {"e": "ETag", "w": "ETag or date", "t": "modification time"}
ANY_VERSION = ExpectedVersion()


def changed(location: str, before: Version, now: Version) -> DatasetError:
    """Return the error for a shard whose version changed while it was read."""
    change = f"it had {before.size:,} bytes and has {now.size:,}"
    if before.size == now.size:
        change = f"it has {now.size:,} bytes as before, but another ETag or date"
    text = (
        f"{location!r} changed while being read: {change}; write shards under another "
        "name and rename them"
    )
    if now.size >= before.size:
        return DatasetError(text, location=location)
    return TruncatedReadError(
        text, location=location, expected=before.size, received=now.size
    )


def opener(path: str, flags: int) -> int:
    """Open a file for the built-in ``open``; reject pipes, devices and ``/proc``."""
    file = os.open(path, flags | NO_WAIT)
    try:
        facts = os.fstat(file)
        check_is_file(facts)
        if not facts.st_size and os.read(file, 1):
            raise OSError(  # noqa: TRY301
                "its size is 0, but it has bytes, as files in /proc: copy it to a disk"
            )
    except BaseException:
        os.close(file)
        raise
    return file


def check_is_file(facts: os.stat_result) -> None:
    if kind := _KINDS.get(stat.S_IFMT(facts.st_mode)):
        raise OSError(f"it is {kind}, not a file: save what it gives to a file")


def version_of_file(file: int | str) -> Version:
    facts = os.fstat(file) if isinstance(file, int) else os.stat(file)  # noqa: PTH116
    return Version(facts.st_size, None, facts.st_mtime)


class NoRangesError(DatasetError):
    """Raised if a server does not support range requests."""


def no_ranges(location: str) -> NoRangesError:
    text = (
        f"{location!r} must be read by ranges, which its server does not give: "
        "download it, and pass the path of the file"
    )
    return NoRangesError(text, location=location)


class Reason:
    """The meaning of an obstore exception, and a text that is safe to show."""

    def __init__(self, exc: Exception) -> None:
        name = type(exc).__name__
        # The server's response body follows the status, and is not shown.
        line, _, status = str(exc).partition("\n")[0].partition("status code: ")
        self.status = _number(status)
        self.code = _number(line.partition("(os error ")[2])
        self.attempts = _number(line.partition(", after ")[2]) + 1
        phrases = [name, *(phrase for phrase in _PHRASES if phrase in line)]
        if self.status:
            phrases.append(
                f"HTTP {self.status} {responses.get(self.status, '')}".rstrip()
            )
        elif self.code:
            phrases.append(os.strerror(self.code))
        ranges = line.partition("error: Requested ")[2]
        if ranges and not ranges.strip("0123456789., got"):
            phrases.append(f"requested {ranges}")
        self.text = ", ".join(phrases)
        # After a cut, obstore requests the rest; without ranges, only that error shows.
        self.is_cut_short = _CUT in phrases or _NO_RANGES in phrases
        is_past = self.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
        # The messages of MemoryStore and LocalStore:
        is_past |= "Wanted range starting" in line
        self.is_out_of_range = is_past or "Requested range was invalid" in line
        self.is_bad_key = name == "InvalidPathError" or "Could not parse path" in line
        # Without credentials, obstore asks for those of a cloud's virtual machine.
        self.is_unauthorised = any(address in line for address in _METADATA)
        self.has_no_length, self.is_circular = _NO_LENGTH in phrases, _CIRCLE in phrases
        # A server may omit the size, as in "bytes 0-9/*", but obstore needs it.
        self.has_no_total = "CONTENT_RANGE header" in line
        self.is_unreachable = _NO_CONNECTION in phrases


def _number(text: str) -> int:
    """Return the number that ``text`` starts with, or 0."""
    return int(text[: len(text) - len(text.lstrip("0123456789"))] or 0)


def failure_of(verb: str, location: str, exc: Exception, url: str = "") -> DatasetError:
    """Return the error for an obstore exception; say whether a signed URL expired."""
    reason = Reason(exc)
    kind = _kind_of(exc, reason)
    text = f"cannot {verb} {location!r}: {reason.text}"
    if reason.attempts > 1:
        text += f", after {reason.attempts} attempts"
    if reason.is_bad_key:
        key = redact_key(str(exc).partition('Path "')[2].partition('"')[0])
        text += (
            f"; obstore cannot address the key {key!r}, because it has an empty "
            "segment, '.', '..', a control character or bytes that are not UTF-8: copy "
            "it to another key, or pass a file system of fsspec as store="
        )
    elif reason.status in _REFUSED_STATUSES and (expired := _expired_at(url)):
        text += f"; the signed URL expired at {expired}; sign it again"
    elif reason.is_unauthorised:
        text += (
            "; there are no credentials: set the environment variables, or pass "
            "store_options with keys, a credential_provider or skip_signature=True"
        )
    elif kind is ObjectPermissionError and not reason.code:
        text += "; check the credentials (environment, credential_provider) and grants"
    else:
        text += _advice(verb, location, kind, reason)
    return kind(text, location=location, attempts=reason.attempts)


def _advice(verb: str, location: str, kind: type[DatasetError], reason: Reason) -> str:
    """Return the end of an error message, which tells the user what to do."""
    is_http = location.startswith("http")
    if kind is DatasetError and verb == "list" and is_http:
        return "; plain HTTP has no listing (except WebDAV), so pass keys= or list URLs"
    if kind is ObjectNotFoundError and "://" in location:
        return "; check the address" + (
            ""
            if is_http
            else ", or list again; if the key ends in '/', which obstore lists without "
            "it and cannot read, copy it to another key"
        )
    if reason.is_circular:
        return "; the server redirects in a circle; check the address"
    if reason.is_unreachable:
        return "; check the host, the network and certificates (client_options)"
    if reason.has_no_length:
        return (
            "; the server sends it without its length (Content-Length), which obstore "
            "needs: serve it as a file, or download it first"
        )
    return ""


def _expired_at(url: str) -> datetime | None:
    """Return when a signed URL expired; None if it is still valid or not signed."""
    fields = {
        name.lower().removeprefix("x-amz-").removeprefix("x-goog-"): value
        for name, value in parse_qsl(url.partition("?")[2])
    }
    try:
        if "se" in fields:  # Azure
            until = datetime.fromisoformat(fields["se"])
        else:
            until = datetime.fromtimestamp(int(fields["expires"]), UTC)
            if "date" in fields:
                until += datetime.fromisoformat(fields["date"]) - _EPOCH
    except (ValueError, KeyError, OverflowError, TypeError):
        return None
    return until if until.timestamp() < time.time() else None


def _kind_of(exc: Exception, reason: Reason) -> type[DatasetError]:
    is_missing = reason.status == HTTPStatus.NOT_FOUND or reason.code == errno.ENOENT
    if is_missing or isinstance(exc, FileNotFoundError):
        return ObjectNotFoundError
    is_refused = type(exc).__name__ in _REFUSED_TYPES or isinstance(
        exc, PermissionError
    )
    is_refused |= reason.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}
    is_refused |= reason.code in {errno.EACCES, errno.EPERM}
    return ObjectPermissionError if is_refused else DatasetError


def truncated(
    location: str, expected: int, received: int, where: str = " announced"
) -> TruncatedReadError:
    return TruncatedReadError(
        f"{location!r} gave {received:,} of {expected:,} bytes{where}",
        location=location,
        expected=expected,
        received=received,
    )


def compressed(location: str, coding: str) -> DatasetError:
    text = (
        f"{location!r} is sent compressed, with Content-Encoding: {coding}; store or "
        "serve it as it is"
    )
    return DatasetError(text, location=location)


def file_failure(path: str, cause: Exception) -> DatasetError:
    match cause:
        case FileNotFoundError():
            return ObjectNotFoundError(f"no such file: {path!r}", location=path)
        case PermissionError():
            return ObjectPermissionError(
                f"may not read {path!r}: check its mode", location=path
            )
        case IsADirectoryError():
            text = f"{path!r} is a directory, not a file: pass a pattern, 'dir/*'"
        case OSError():
            text = f"cannot read {path!r}: {cause.strerror or cause}"
        case _:
            text = f"cannot read {path!r}: {type(cause).__name__}: {cause}"
    return DatasetError(text, location=path)
