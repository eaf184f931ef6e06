"""The layout of a batch's buffers: buffers that share memory stay together.

Tensors may be views of the same memory, such as the inputs and targets of a language
model. Their buffers overlap. Overlapping parts are copied once, so that the tensors
share memory at the receiver too, as in torch. Costs as much as a sort.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

# Alignment of buffers, enough for every type.
ALIGN = 64

Place: TypeAlias = tuple[int, int]  # first byte, and size


class Layout(NamedTuple):
    """The places of buffers.

    Attributes:
        places: The place of each buffer.
        copies: What to copy, and to which first byte, in that order.
        end: The first byte after all of them.
    """

    places: list[Place]
    copies: list[tuple[int, memoryview]]
    end: int


def lay_out(raws: Sequence[memoryview], addresses: Sequence[int], at: int) -> Layout:
    """Lay buffers out from byte ``at`` on.

    Args:
        raws: The buffers, of shape ``(nbytes,)``.
        addresses: The address of each; 0: keep it separate from others.
        at: The first free byte.
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
    """Tell whether any two spans of memory overlap."""
    last = 0
    for address, nbytes in sorted(spans):
        if address < last:
            return True
        last = address + nbytes
    return False


def aligned(place: int) -> int:
    """Return ``place`` rounded up to the alignment of buffers."""
    return -(-place // ALIGN) * ALIGN
