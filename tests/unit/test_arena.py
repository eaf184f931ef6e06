"""Slots in shared memory: one owner at a time, grown on demand, freed when idle."""

import os
from typing import Any, Self

import numpy as np
import pytest

from aioloader._transport import arena as module
from aioloader._transport.arena import ArenaReader, ArenaWriter
from aioloader.errors import BatchTooLargeError


class Pair:
    """Both sides of one arena, in one process."""

    def __init__(self) -> None:
        self.writer = ArenaWriter()
        self.reader = ArenaReader(os.dup(self.writer.descriptor))

    def pass_on(self, nbytes: int, value: int) -> np.ndarray[Any, Any]:
        """Return what the reader sees of a batch of ``value``s."""
        ref, view = self.writer.take(nbytes)
        view[:nbytes] = value
        del view
        return self.reader.view(ref, nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.reader.close()
        self.writer.close()

    def resident(self) -> int:
        """Return how many bytes of memory the file has."""
        return os.fstat(self.writer.descriptor).st_blocks * 512


def test_growing_batches_do_not_pile_up_memory() -> None:
    with Pair() as pair:
        for exponent in range(13, 24):
            pair.pass_on(1 << exponent, 3)
        assert pair.resident() < 2.2 * (1 << 23)


def test_idle_slots_give_their_pages_back() -> None:
    """The kernel gets the memory of a burst back once it is over."""
    with Pair() as pair:
        burst = [pair.pass_on(1 << 18, 1) for _ in range(20)]
        assert pair.resident() > 20 << 18
        del burst
        for value in range(200):
            pair.pass_on(1 << 18, value % 251)
        assert pair.resident() < 4 << 18
        again = [pair.pass_on(1 << 18, value) for value in range(20)]
        assert [int(view.min()) for view in again] == list(range(20))


def test_a_batch_larger_than_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the numbers; the arena can be used afterwards."""
    with Pair() as pair:
        monkeypatch.setattr(module, "memory_left", lambda: 1 << 20)
        with pytest.raises(BatchTooLargeError, match="1,048,576 are avail") as caught:
            pair.writer.take(1 << 30)
        assert (caught.value.nbytes or 0) >= 1 << 30
        assert caught.value.slot_bytes == 1 << 20
        monkeypatch.setattr(module, "memory_left", lambda: 1 << 62)
        with pytest.raises(BatchTooLargeError):
            pair.writer.take(1 << 61)
        assert pair.pass_on(100, 4).min() == 4
