"""Layouts: buffers of one memory stay together, all others stay apart."""

from hypothesis import given
from hypothesis import strategies as st

from aioloader._transport.codec import ALIGN, do_overlap, lay_out

MEMORY = bytes(k % 251 for k in range(4096))
BASE = 1 << 20  # its address, say
pieces = st.lists(
    st.tuples(st.integers(0, 4000), st.integers(0, 96), st.booleans()), max_size=12
)


@given(pieces, st.integers(0, 100))
def test_laws(drawn: list[tuple[int, int, bool]], at: int) -> None:
    """Contents arrive; what overlaps does so again, by as much; nothing else does."""
    raws = [memoryview(MEMORY)[first : first + size] for first, size, _ in drawn]
    addresses = [BASE + first if tied else 0 for first, _, tied in drawn]
    places, copies, end = lay_out(raws, addresses, at)
    target = bytearray(end)
    for start, raw in copies:
        target[start : start + raw.nbytes] = raw
    for (start, size), raw, address in zip(places, raws, addresses, strict=True):
        assert start >= at
        assert target[start : start + size] == bytes(raw)
        assert start % ALIGN == address % ALIGN
    whole = [(p, a, n) for (p, n), a in zip(places, addresses, strict=True) if n]
    for k, (place, address, size) in enumerate(whole):
        for other, its_address, its_size in whole[:k]:
            is_one = place < other + its_size and other < place + size
            tied = bool(address and its_address)
            meets = address < its_address + its_size and its_address < address + size
            assert is_one == (tied and meets)
            if is_one:
                assert other - place == its_address - address


def test_copies_are_made_once() -> None:
    """Ten views of one memory take no more room than that."""
    raws = [memoryview(MEMORY)[k:] for k in range(10)]
    _, copies, end = lay_out(raws, [BASE + k for k in range(10)], 0)
    assert end == len(MEMORY)
    assert sum(raw.nbytes for _, raw in copies) == len(MEMORY)


def test_overlaps() -> None:
    """Neighbours do not overlap."""
    assert not do_overlap([])
    assert not do_overlap([(10, 5), (0, 10), (15, 1)])
    assert do_overlap([(10, 5), (0, 11)])
