"""Generators of samples, run over bytes in memory, in pieces of any size."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any

from aioloader.datasets._engine import Feed, Steps


def pieces_of(data: bytes, sizes: Iterable[int]) -> Iterator[bytearray]:
    """Yield ``data`` in pieces; each is overwritten when the next is due."""
    at = 0
    for size in sizes:
        piece = bytearray(data[at : at + size])
        if not piece:
            return
        at += size
        yield piece
        piece[:] = b"\xff" * len(piece)


def steps(
    make: Callable[[Feed], Steps],
    data: bytes,
    sizes: Sequence[int] = (1 << 20,),
    limits: Sequence[int] = (64,),
    **options: Any,
) -> Iterator[tuple[list[Any], int]]:
    """Yield blocks, each with the position after it; the last size and limit go on."""
    at = options.pop("at", 0)
    feed = Feed(options.pop("url", "x"), at, **options)
    pieces = pieces_of(data[at:], chain(sizes, repeat(sizes[-1])))
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
