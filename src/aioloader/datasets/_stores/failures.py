"""Errors for obstore's exceptions, without secrets that their texts may hold.

obstore dumps whole requests: URLs with user, password and signature, bodies of the
server, texts of credential providers. So only listed parts of a text are passed on: the
status, names of error kinds, S3's error code, the number of retries. The original is
not chained either, because a traceback would print it.
"""

import errno
import os
import re
import time
from datetime import UTC, datetime
from http import HTTPStatus
from urllib.parse import parse_qsl

from aioloader.datasets._stores.redact import redact_key
from aioloader.errors import (
    DatasetError,
    ObjectNotFoundError,
    ObjectPermissionError,
    TruncatedReadError,
)

_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_STATUS = re.compile(r"\bstatus: (\d{3})\b")
_KIND = re.compile(r"\bkind: ([A-Z]\w*)|\b(TimedOut|BadScheme)\b")
_OS_ERROR = re.compile(r"\bOs \{\s*code: (\d+)")
_RETRIES = re.compile(r"\bretries: (\d+)")
_RANGES = re.compile(
    r"UnexpectedRange \{\s*expected: (\d+)\.\.(\d+),\s*actual: (\d+)\.\.(\d+)"
)
_S3_CODE = re.compile(r"<Code>([A-Za-z]{1,40})</Code>")
# Where virtual machines request credentials: AWS and Azure, Google.
_METADATA = re.compile(r"/latest/api/token|/metadata/identity|computeMetadata|IMDS")
OPTION = re.compile(
    r"(?:Invalid|Configuration) key: '?(\w+)|"
    r"(\w+ must be specified|Store does not accept [a-z ]+|Missing\w+)"
)

_EPOCH = datetime.fromtimestamp(0, UTC)
_NO_CONNECTION = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH}

# By name, so that this module does not import obstore.
_REFUSALS = frozenset({"PermissionDeniedError", "UnauthenticatedError"})


# Statuses of refused requests.
_REFUSING = frozenset({400, 401, 403})


class NoRangesError(DatasetError):
    """A server gives objects only as a whole."""


def no_ranges(location: str) -> NoRangesError:
    text = (
        f"{location!r} must be read by ranges, which its server does not give: "
        "download it, and pass the path of the file"
    )
    return NoRangesError(text, location=location)


class Reason:
    """The parts of an obstore exception that may be shown, and what they mean."""

    def __init__(self, exc: Exception) -> None:
        text, name = str(exc), type(exc).__name__
        # Rust's dump quotes everything from outside; the rest is names.
        dump = _QUOTED.sub('""', text.partition("\nDebug source:\n")[2])
        self.status, self.code, retries = (
            int(match[1]) if (match := pattern.search(dump)) else 0
            for pattern in (_STATUS, _OS_ERROR, _RETRIES)
        )
        self.attempts = retries + 1
        said = [name]
        if self.status:
            said += [_phrase(self.status), *_S3_CODE.findall(text)[:1]]
        elif self.code:
            said.append(os.strerror(self.code))
        else:
            said += dict.fromkeys(a or b for a, b in _KIND.findall(dump))
            said += [a or b for a, b in OPTION.findall(text)][:1]
        if ranges := _RANGES.search(dump):
            words = "bytes {}..{} were requested, {}..{} came"
            said.append(words.format(*ranges.groups()))
        if is_unknown := '"dns error"' in text:
            said.append("the host's name is not known")
        self.text = ", ".join(said)
        # The body is shorter than announced. If a server cannot send the rest, only the
        # second error is reported.
        self.is_cut_short = "UnexpectedEof" in dump or "RangeNotSupported" in dump
        is_past = self.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
        self.is_out_of_range = is_past or "StartTooLarge" in dump
        self.is_bad_key = name == "InvalidPathError" or "Could not parse path" in text
        # There are no credentials: the machine's own were requested, as in a cloud.
        self.is_unauthorised = bool(_METADATA.search(text))
        self.has_no_length = "MissingContentLength" in dump
        self.is_circular = "TooManyRedirects" in dump
        # "bytes 0-9/*" is right, but obstore needs the size.
        self.has_no_total = "ParseContentRange" in dump
        is_refused = self.code in _NO_CONNECTION
        self.is_unreachable = is_unknown or is_refused


def _phrase(status: int) -> str:
    known = {member.value: member.phrase for member in HTTPStatus}
    return f"HTTP {status} {known.get(status, '')}".rstrip()


def failure_of(verb: str, location: str, exc: Exception, url: str = "") -> DatasetError:
    """Return the DatasetError for an obstore exception; ``url`` may be a signed one."""
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
    elif reason.status in _REFUSING and (expired := _expired_at(url)):
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
    """Return what to do about a request that was understood, and not refused."""
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
    if "Connect" in reason.text:
        return "; check the host, the network and certificates (client_options)"
    if reason.has_no_length:
        return (
            "; the server sends it without its length (Content-Length), which obstore "
            "needs: serve it as a file, or download it first"
        )
    return ""


def _expired_at(url: str) -> datetime | None:
    """Return when a signed URL expired, as its query says; None if it did not."""
    fields = {
        name.lower().removeprefix("x-amz-").removeprefix("x-goog-"): value
        for name, value in parse_qsl(url.partition("?")[2])
    }
    try:
        if "se" in fields:  # of Azure
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
    is_refused = type(exc).__name__ in _REFUSALS or isinstance(exc, PermissionError)
    is_refused |= reason.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}
    is_refused |= reason.code in {errno.EACCES, errno.EPERM}
    return ObjectPermissionError if is_refused else DatasetError


def truncated(
    location: str, expected: int, received: int, what: str = " announced"
) -> TruncatedReadError:
    """Return the error for a read of another length than expected."""
    return TruncatedReadError(
        f"{location!r} gave {received:,} of {expected:,} bytes{what}",
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
    """Return the DatasetError for a file that cannot be read."""
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
