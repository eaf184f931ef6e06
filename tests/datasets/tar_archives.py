"""Generators of samples, run over bytes in memory, and tar archives for them."""

import io
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, pairwise, repeat
from typing import Any

from aioloader._base.blocks import FailedSample
from aioloader.datasets._streams.engine import ByteFeed, Steps
from aioloader.datasets._streams.shards import MissingEnd
from aioloader.datasets.tar import samples


def pieces_of(data: bytes, sizes: Iterable[int]) -> Iterator[bytearray]:
    """Yield ``data`` in pieces; each is overwritten before the next one."""
    start = 0
    for size in sizes:
        piece = bytearray(data[start : start + size])
        if not piece:
            return
        start += size
        yield piece
        piece[:] = b"\xff" * len(piece)


def steps(
    make: Callable[[ByteFeed], Steps],
    data: bytes,
    sizes: Sequence[int] = (1 << 20,),
    limits: Sequence[int] = (64,),
    **options: Any,
) -> Iterator[tuple[list[Any], int]]:
    """Yield blocks with the position after each; the last size and limit repeat."""
    start = options.pop("start", 0)
    feed = ByteFeed(options.pop("url", "x"), start, **options)
    pieces = pieces_of(data[start:], chain(sizes, repeat(sizes[-1])))
    turns = chain(limits, repeat(limits[-1]))
    feed.want = next(turns)
    for step in make(feed):
        if step is None:
            assert not feed.has_ended
            feed.give(next(pieces, b""))
        else:
            assert len(step[0]) <= feed.want
            yield step
            feed.want = next(turns)


URL = "s3://bucket/shard-000.tar"
FORMATS = {
    "ustar": tarfile.USTAR_FORMAT,
    "gnu": tarfile.GNU_FORMAT,
    "pax": tarfile.PAX_FORMAT,
}


@dataclass(frozen=True)
class Member:
    """A member for tarfile to put into an archive."""

    name: str
    body: bytes = b""
    kind: bytes = tarfile.REGTYPE
    mtime: float = 0


def archive(members: Iterable[Member], form: str = "ustar") -> bytes:
    """Return an archive as tarfile writes it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=FORMATS[form]) as tar:
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.type, info.size = member.kind, len(member.body)
            info.mtime = member.mtime
            if member.kind in {tarfile.LNKTYPE, tarfile.SYMTYPE}:
                info.linkname = "elsewhere/" * (5 if form == "ustar" else 20)
            tar.addfile(info, io.BytesIO(member.body))
    return out.getvalue()


def files(**bodies: bytes) -> list[Member]:
    """Return members of a top folder; ``a__jpg`` is ``a.jpg``."""
    return [Member(name.replace("__", "."), body) for name, body in bodies.items()]


def signed(block: bytes, *, signed_bytes: bool = False) -> bytes:
    """Return a header with the checksum that it should have."""
    blank = block[:148] + b" " * 8 + block[156:]
    total = sum(byte - 256 * (signed_bytes and byte > 127) for byte in blank)
    return block[:148] + b"%06o\0 " % total + block[156:]


def header(
    name: bytes, size: int | bytes, kind: bytes = b"0", *, tail: bytes = b"ustar\x0000"
) -> bytes:
    """Return a header; ``size`` in bytes is the field itself, ``tail`` from 257 on."""
    field = size if isinstance(size, bytes) else b"%011o\0" % size
    block = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + field
    block += b"%011o\0" % 0 + b" " * 8 + kind
    return signed(block.ljust(257, b"\0").ljust(257) + tail.ljust(255, b"\0"))


def padded(body: bytes) -> bytes:
    """Return a body padded to whole blocks."""
    return body + bytes(-len(body) % 512)


def member(name: bytes, body: bytes, kind: bytes = b"0") -> bytes:
    """Return one plain member, header and body."""
    return header(name, len(body), kind) + padded(body)


def pax(records: dict[str, str], kind: bytes = b"x") -> bytes:
    """Return a PAX header with its records."""
    lines = b"".join(_record(key, value) for key, value in records.items())
    return member(b"././@PaxHeader", lines, kind)


def _record(key: str, value: str) -> bytes:
    rest = f" {key}={value}\n".encode()
    length = len(rest)
    while length != len(rest) + len(str(length)):
        length = len(rest) + len(str(length))
    return str(length).encode() + rest


ZEROS = bytes(1024)


def walk(
    data: bytes,
    sizes: Sequence[int] = (1 << 20,),
    limits: Sequence[int] = (64,),
    **options: Any,
) -> list[Any]:
    """Return all samples of ``data``; the last size and limit repeat."""
    return [x for block, _ in walked(data, sizes, limits, **options) for x in block]


def walked(
    data: bytes,
    sizes: Sequence[int] = (1 << 20,),
    limits: Sequence[int] = (64,),
    *,
    max_sample_bytes: int = 1 << 28,
    missing_end: MissingEnd = "error",
    start: int = 0,
) -> list[tuple[list[Any], int]]:
    """Return blocks with the position after each; check that none goes backward."""
    make = partial(samples, max_sample_bytes, missing_end)
    blocks = [*steps(make, data, sizes, limits, start=start, url=URL)]
    positions = [start, *(after for _, after in blocks)]
    assert [*pairwise(positions)] == sorted(pairwise(positions))
    return blocks


def plain(results: Iterable[Any]) -> list[Any]:
    """Return results in a form that can be compared."""
    return [
        (type(result.error), str(result.error))
        if isinstance(result, FailedSample)
        else result
        for result in results
    ]


def expected(data: bytes) -> list[Any]:
    """Return the samples of WebDataset's rules over tarfile's members, or Bad."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = [
            (split, body.read())
            for info in tar
            if info.isreg() and (split := _split(info.name))
            if (body := tar.extractfile(info))
        ]
    made: list[Any] = []
    for key, group in groupby(members, lambda member: member[0][0]):
        fields = [(split[1], body) for split, body in group]
        whole = len(dict(fields)) == len(fields)
        made.append(
            {"__key__": key, "__url__": URL, **dict(fields)} if whole else FailedSample
        )
    return made


def _split(name: str) -> tuple[str, str] | None:
    if re.match(r"__[^/]*__(/|$)", name):
        return None
    match = re.fullmatch(r"((?:.*/)?[^/.]+)\.([^/]*)", name, re.DOTALL)
    return match and (match[1], match[2].lower())
