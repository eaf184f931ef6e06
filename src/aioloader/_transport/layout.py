"""Where the buffers of a batch go: buffers that share memory stay together.

Tensors may be views of one memory (the inputs and targets of a language model, say).
Their buffers overlap. Overlapping parts are copied once, so that the tensors share
memory where they arrive too, as with torch. Memory and time: those of a sort.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

# Where buffers begin, so that every type is aligned.
ALIGN = 64

Place: TypeAlias = tuple[int, int]  # first byte, and size


class Layout(NamedTuple):
    """What goes where.

    Attributes:
        places: The place of each buffer.
        copies: What is to be copied, and to which first byte; in that order.
        end: The first byte after all of them.
    """

    places: list[Place]
    copies: list[tuple[int, memoryview]]
    end: int


def lay_out(raws: Sequence[memoryview], addresses: Sequence[int], at: int) -> Layout:
    """Lay buffers out from byte ``at`` on.

    Args:
        raws: The buffers, of shape ``(nbytes,)``.
        addresses: Where each lies in memory; 0: it is to be kept apart from others.
        at: The first byte that is free.
    """
    places: list[Place] = [(0, 0)] * len(raws)
    copies: list[tuple[int, memoryview]] = []
    start = first = last = 0  # of a block of memory: its place, its addresses
    for k in sorted(range(len(raws)), key=addresses.__getitem__):
        raw, address, nbytes = raws[k], addresses[k], raws[k].nbytes
        if address < last:
            place = start + address - first
            if address + nbytes > last:
                copies.append((start + last - first, raw[last - address :]))
                last = address + nbytes
                at = place + nbytes
        else:
            place = aligned(at) + address % ALIGN
            if address:
                start, first, last = place, address, address + nbytes
            copies.append((place, raw))
            at = place + nbytes
        places[k] = place, nbytes
    return Layout(places, copies, aligned(at))


def do_overlap(spans: Sequence[Place]) -> bool:
    """Tell whether any two pieces of memory overlap."""
    last = 0
    for address, nbytes in sorted(spans):
        if address < last:
            return True
        last = address + nbytes
    return False


def aligned(place: int) -> int:
    """Return ``place`` rounded up to where a buffer may begin."""
    return -(-place // ALIGN) * ALIGN
