"""Shared slots: one owner at a time, grown on demand, given back when idle."""

import gc
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import numpy as np
import pytest

from aioloader._transport import arena as module
from aioloader._transport.arena import PLACES, ArenaReader, ArenaWriter
from aioloader.errors import BatchTooLargeError


class Locking:
    """Page-locks nothing, but knows what should be."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def __call__(self, address: int, nbytes: int) -> Callable[[], object]:
        """Lock whole pages, once."""
        assert address not in self.locked
        assert not address % 4096
        assert not nbytes % 4096
        self.locked[address] = nbytes
        return partial(self.locked.pop, address)


class Pair:
    """Both sides of one arena, in one process."""

    def __init__(self, locker: Locking | None = None) -> None:
        self.writer = ArenaWriter()
        self.reader = ArenaReader(os.dup(self.writer.descriptor), locker=locker)

    def pass_on(self, nbytes: int, value: int) -> np.ndarray[Any, Any]:
        """Return what the reader sees of a batch of ``value``s."""
        ref, view = self.writer.take(nbytes)
        view[:nbytes] = value
        del view
        return self.reader.lease(ref, nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.reader.close()
        self.writer.close()

    def resident(self) -> int:
        """Return how many bytes of memory the file has."""
        return os.fstat(self.writer.descriptor).st_blocks * 512


def test_locked_slots_that_have_become_too_small() -> None:
    """The reader unlocks them, and gives their pages back; then the file is small."""
    locker = Locking()
    with Pair(locker) as pair:
        for nbytes in (100_000, 1_000_000, 10_000_000):
            for value in range(4):
                assert pair.pass_on(nbytes, value).max() == value
        assert max(locker.locked.values()) >= 10_000_000
        assert min(locker.locked.values()) >= 10_000_000
        assert pair.resident() < 25_000_000
    del pair
    gc.collect()
    assert locker.locked == {}


def test_slots_grow_and_the_small_ones_are_given_up() -> None:
    """Growing batches do not pile up memory."""
    with Pair() as pair:
        for exponent in range(13, 24):
            pair.pass_on(1 << exponent, 3)
        assert pair.resident() < 2.2 * (1 << 23)


def test_idle_slots_give_their_pages_back() -> None:
    """What a burst needed goes back to the kernel once it is over."""
    with Pair() as pair:
        burst = [pair.pass_on(1 << 18, 1) for _ in range(20)]
        assert pair.resident() > 20 << 18
        del burst
        for value in range(200):
            pair.pass_on(1 << 18, value % 251)
        assert pair.resident() < 4 << 18
        again = [pair.pass_on(1 << 18, value) for value in range(20)]
        assert [int(view.min()) for view in again] == list(range(20))


def test_a_forked_childs_copy_frees_nothing() -> None:
    """A slot that the parent holds stays taken when a child drops its copy."""
    with Pair() as pair:
        view = pair.pass_on(5000, 5)
        pid = os.fork()
        if pid == 0:
            del view
            os._exit(0)
        os.waitpid(pid, 0)
        pair.pass_on(5000, 6)
        assert view.min() == 5


def test_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the numbers, also of what the system refuses; the arena goes on."""
    with Pair() as pair:
        monkeypatch.setattr(module, "memory_left", lambda: 1 << 20)
        with pytest.raises(
            BatchTooLargeError, match="1,048,576 are available"
        ) as caught:
            pair.writer.take(1 << 30)
        assert (caught.value.nbytes or 0) >= 1 << 30
        assert caught.value.slot_bytes == 1 << 20
        monkeypatch.setattr(module, "memory_left", lambda: 1 << 62)
        with pytest.raises(BatchTooLargeError):
            pair.writer.take(1 << 61)
        assert pair.pass_on(100, 4).min() == 4


def test_what_a_writer_makes_is_seen_after_its_death() -> None:
    """The oldest ticket comes first; what was sent is gone; slots are elsewhere."""
    with Pair() as pair:
        for place in range(PLACES):
            pair.writer.begin(place, 100 - place)
        pair.writer.enter(3, 2)
        pair.writer.clear(0)
        assert pair.pass_on(5000, 5).min() == 5
        pair.writer.close()
        found = pair.reader.in_flight()
    assert [one.ticket for one in found] == list(range(69, 100))
    assert [one.ticket for one in found if one.stage == 2] == [97]
    assert all(one.seconds >= 0 for one in found)
