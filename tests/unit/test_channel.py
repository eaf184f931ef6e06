"""Frames between processes: whole, with descriptors, and an end that is seen."""

import os
import socket
from collections.abc import Iterator

import pytest

from aioloader._transport.channel import MAX_INLINE, NO_WAIT, Channel

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Return both ends, closed at the end."""
    pair = Channel.pair()
    yield pair
    for end in pair:
        end.close()


@pytest.mark.parametrize(
    "size", [0, 1, 1000, MAX_INLINE, MAX_INLINE + 1, 3 << 20], ids=str
)
def test_frames_arrive_whole(ends: Ends, size: int) -> None:
    """Of any size; one after the other."""
    frames = [bytes([number]) * size for number in range(3)]
    for frame in frames:
        assert ends[0].send_frame(frame)
    for frame in frames:
        assert ends[1].receive_frame() == (frame, [])


def test_a_default_timeout_of_the_process_does_not_count() -> None:
    """``socket.setdefaulttimeout`` is about the user's sockets."""
    socket.setdefaulttimeout(7)
    try:
        ends = Channel.pair()
        adopted = Channel.adopt(os.dup(ends[1].fileno()))
    finally:
        socket.setdefaulttimeout(None)
    assert [end.gettimeout() for end in (*ends, adopted)] == [0, None, None]
    for end in (*ends, adopted):
        end.close()


def test_the_loaders_end_never_blocks(ends: Ends) -> None:
    """A full queue refuses a frame; an empty one has none."""
    assert ends[0].receive_frame() is None
    assert ends[1].receive_frame(NO_WAIT) is None
    count = 0
    while ends[0].send_frame(b"x" * 10_000):
        count += 1
    assert count > 10
    for _ in range(count):
        assert ends[1].receive_frame() == (b"x" * 10_000, [])
    assert ends[1].receive_frame(NO_WAIT) is None
    assert ends[0].send_frame(b"again")
