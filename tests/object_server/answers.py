"""The answers of the object server: objects, ranges, listings; no socket and no loop.

An answer holds a way to read its body, not the body, so objects made on demand cost no
memory. Listings are in the order of names, by code point, as in S3.
"""

import re
import threading
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import Self, TypeAlias
from urllib.parse import parse_qsl, unquote
from xml.sax.saxutils import escape

from typing_extensions import Buffer

Make: TypeAlias = Callable[[str, int, int], Buffer]
Read: TypeAlias = Callable[[int, int], Buffer]

BUCKET = "bucket"
MAX_KEYS = 1000  # per page of a listing, as in S3
_BEGAN = "Wed, 01 Jan 2020 00:00:00 GMT"
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_LISTED = (
    "<Contents><Key>{}</Key><LastModified>2020-01-01T00:00:00.000Z</LastModified><ETag>{}</ETag>"
    "<Size>{}</Size><StorageClass>STANDARD</StorageClass></Contents>"
)


@dataclass(frozen=True)
class Stored:
    """One version of one object; it stays intact when the object is replaced."""

    size: int
    etag: str
    read: Read


class Shelf:
    """Holds the objects by name; any thread may change them."""

    def __init__(
        self, objects: Mapping[str, Buffer], make: Make | None, sizes: Mapping[str, int]
    ) -> None:
        self._make = make
        self._sizes = dict(sizes)
        self._versions = 0
        self._lock = threading.Lock()
        self._sorted: list[str] | None = None
        self._stored: dict[str, Stored] = {}
        for name, data in objects.items():
            self.replace(name, data)

    def get(self, name: str) -> Stored | None:
        """Return the current version of ``name``."""
        stored = self._stored.get(name)
        if stored is not None or self._make is None or name not in self._sizes:
            return stored
        size = self._sizes[name]
        etag = f'"{zlib.crc32(name.encode()):08x}-{size:x}"'
        return Stored(size, etag, partial(self._made, name))

    def replace(self, name: str, data: Buffer) -> None:
        """Replace ``name`` by ``data``, with a new ETag."""
        whole = bytes(data)
        view = memoryview(whole)
        with self._lock:
            self._versions += 1
            etag = f'"{zlib.crc32(whole):08x}-{len(whole):x}-{self._versions:x}"'
            self._stored[name] = Stored(
                len(whole), etag, lambda start, stop: view[start:stop]
            )
            self._sorted = None

    def names(self) -> list[str]:
        """Return all names, sorted; do not modify the list."""
        with self._lock:
            if self._sorted is None:
                self._sorted = sorted(self._stored.keys() | self._sizes.keys())
            return self._sorted

    def _made(self, name: str, start: int, stop: int) -> Buffer:
        assert self._make is not None
        return self._make(name, start, stop)


@dataclass(frozen=True)
class Request:
    """The head of a request; names of fields in lower case."""

    method: str
    path: str
    query: str
    fields: dict[str, str]

    @classmethod
    def parse(cls, head: bytes) -> Self:
        """Parse a head, including its empty line."""
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        method, target, _ = first.split(" ")
        path, _, query = target.partition("?")
        parts = (line.partition(":") for line in lines)
        fields = {name.lower(): value.strip() for name, _, value in parts}
        return cls(method, unquote(path).removeprefix("/"), query, fields)

    @property
    def name(self) -> str:
        """Name of the requested object; empty for the bucket itself."""
        return self.path.removeprefix(BUCKET).lstrip("/") if self._is_s3 else self.path

    @property
    def _is_s3(self) -> bool:
        return self.path == BUCKET or self.path.startswith(f"{BUCKET}/")

    @property
    def is_listing(self) -> bool:
        """Whether it is a request to list the bucket."""
        return self._is_s3 and not self.name and "list-type=2" in self.query

    @property
    def is_last(self) -> bool:
        """Whether it ends the connection: by request, or because a body may follow."""
        closes = self.fields.get("connection", "").lower() == "close"
        return closes or self.method not in {"GET", "HEAD"}


@dataclass(frozen=True)
class Answer:
    """A head, and how to read the body from ``start`` to ``stop``."""

    status: int
    fields: dict[str, str]
    read: Read
    start: int
    stop: int

    def head(self) -> bytes:
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        lines.append(f"Content-Length: {self.stop - self.start}")
        lines += [f"{name}: {value}" for name, value in self.fields.items()]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


def answer(request: Request, shelf: Shelf, max_keys: int) -> Answer:
    """Return the answer of a server without faults."""
    if request.method not in {"GET", "HEAD"}:
        return failure(405, "MethodNotAllowed", {"Allow": "GET, HEAD"})
    if request.is_listing:
        return _listing(request, shelf, max_keys)
    stored = shelf.get(request.name)
    if stored is None:
        return failure(404, "NoSuchKey")
    if request.fields.get("if-match", stored.etag) not in {"*", stored.etag}:
        return failure(412, "PreconditionFailed")
    return _object(request, stored)


def failure(status: int, code: str, fields: dict[str, str] | None = None) -> Answer:
    """Return an error answer, in S3's form."""
    body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    return _of_bytes(status, body, fields or {})


def _of_bytes(status: int, body: bytes, fields: dict[str, str]) -> Answer:
    fields = {"Content-Type": "application/xml", **fields}
    read: Read = lambda start, stop: body[start:stop]  # noqa: E731
    return Answer(status, fields, read, 0, len(body))


def _object(request: Request, stored: Stored) -> Answer:
    fields = {
        "ETag": stored.etag,
        "Last-Modified": _BEGAN,
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
    }
    span = _span(request.fields.get("range", ""), stored.size)
    if span is None:
        return Answer(200, fields, stored.read, 0, stored.size)
    start, stop = span
    if start >= stop:
        return failure(416, "InvalidRange", {"Content-Range": f"bytes */{stored.size}"})
    fields["Content-Range"] = f"bytes {start}-{stop - 1}/{stored.size}"
    return Answer(206, fields, stored.read, start, stop)


def _span(asked: str, size: int) -> tuple[int, int] | None:
    """Return the half-open range requested; None if none, or not a single one."""
    match = _RANGE.fullmatch(asked)
    first, last = match.groups() if match else ("", "")
    if not first:
        return (max(0, size - int(last)), size) if last else None
    if last and int(last) < int(first):
        return None
    return int(first), min(int(last) + 1, size) if last else size


def _listing(request: Request, shelf: Shelf, max_keys: int) -> Answer:
    """Return one page of a listing."""
    query = dict(parse_qsl(request.query))
    token = bytes.fromhex(query.get("continuation-token", "")).decode()
    prefix, after = query.get("prefix", ""), token or query.get("start-after", "")
    names = list(islice(_names(shelf.names(), prefix, after), max_keys + 1))
    page, more = names[:max_keys], len(names) > max_keys
    rest = ""
    if more:
        rest = page[-1].encode().hex()
        rest = f"<NextContinuationToken>{rest}</NextContinuationToken>"
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>'
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix>"
        f"<MaxKeys>{max_keys}</MaxKeys><KeyCount>{len(page)}</KeyCount>"
        f"<IsTruncated>{str(more).lower()}</IsTruncated>{rest}"
        f"{''.join(_listed(shelf, page))}</ListBucketResult>"
    ).encode()
    return _of_bytes(200, body, {})


def _names(names: list[str], prefix: str, after: str) -> Iterator[str]:
    index = bisect_left(names, prefix)
    if after:
        index = max(index, bisect_right(names, after))
    while index < len(names) and names[index].startswith(prefix):
        yield names[index]
        index += 1


def _listed(shelf: Shelf, names: list[str]) -> Iterator[str]:
    for name in names:
        stored = shelf.get(name)
        if stored is not None:
            yield _LISTED.format(escape(name), escape(stored.etag), stored.size)
