"""How far the consumer of an epoch has come: what was delivered, not what was begun.

Batches may be delivered out of order, so the position is a number below which all were
delivered, and those beyond it that were delivered too. Pure and synchronous; used from
the consumer's thread and from whoever asks for the state.
"""

import threading
from dataclasses import dataclass, field
from typing import Any

from aioloader._order.forks import fork_safe


@dataclass(frozen=True)
class Bookmark:
    """A position in an epoch.

    Attributes:
        done: Every batch below this number was delivered.
        beyond: Batches above that were delivered too.
        states: What the readers (the sampler, or streams) were left in behind the last
            of their batches below ``done``, by number of the reader.
        datasets: What state the copies of a stateful map-style dataset were left in by
            the latest batch of theirs that was delivered, by number of the worker.
    """

    done: int = 0
    beyond: frozenset[int] = frozenset()
    states: dict[int, Any] = field(default_factory=dict)
    datasets: dict[int, Any] = field(default_factory=dict)


BEGINNING = Bookmark()
_NOTHING: frozenset[int] = frozenset()


class Progress:
    """The position of one iteration.

    A batch that raised counts as soon as another one is delivered behind it.

    Args:
        bookmark: Where it began.
        readers: How many readers the batches come from, in turns.
    """

    def __init__(self, bookmark: Bookmark, *, readers: int = 1) -> None:
        self._done = bookmark.done
        self._states = dict(bookmark.states)
        self._datasets = dict(bookmark.datasets)
        self._beyond: dict[int, Any] = {}
        # Delivered before; they are passed when their reader's state is known again.
        self._before = set(bookmark.beyond)
        self._failed: dict[int, Any] = {}
        self._readers = readers
        self._ended: set[int] = set()  # readers
        self._is_over = False
        self._lock = fork_safe(threading.Lock())

    def take(self, number: int, state: Any = None) -> None:
        """Note that a batch was delivered, or turned out to be none.

        Args:
            number: Its number.
            state: What its reader was left in behind it, if that is known.
        """
        with self._lock:
            if number == self._done and state is None and not self._is_patchy():
                self._done += 1  # as nearly always
                return
            if self._failed:
                self._beyond.update(self._failed)
                self._failed.clear()
            self._note(number, state)

    def pass_over(self, number: int, state: Any = None) -> None:
        """Note what a batch that was delivered before has left its reader in."""
        with self._lock:
            self._note(number, state)

    def fail(self, number: int, state: Any = None) -> None:
        """Note that a batch raised."""
        with self._lock:
            self._failed[number] = state

    def end(self, number: int, state: Any = None) -> None:
        """Note that a reader was at its end, instead of batch ``number``."""
        with self._lock:
            if state is not None:
                self._states[number % self._readers] = state

    def end_reader(self, number: int) -> None:
        """Note that the reader of batch ``number`` has ended: no more is to come."""
        with self._lock:
            self._ended.add(number % self._readers)
            self._advance()

    def leave(self, worker: int, state: Any) -> None:
        """Note what state a delivered batch has left a worker's dataset in."""
        with self._lock:
            self._datasets[worker] = state

    def finish(self) -> None:
        """Note that the epoch is over."""
        self._is_over = True

    def is_over(self) -> bool:
        """Tell whether every batch of the epoch was delivered."""
        return self._is_over

    def bookmark(self) -> Bookmark:
        """Return the position now; from any thread."""
        with self._lock:
            beyond = _NOTHING
            if self._before or self._beyond:
                beyond = frozenset(self._before.union(self._beyond))
            states, datasets = dict(self._states), dict(self._datasets)
            return Bookmark(self._done, beyond, states, datasets)

    def _is_patchy(self) -> bool:
        """Tell whether batches beyond the position are not simply all to come."""
        return bool(self._beyond or self._failed or self._before)

    def _note(self, number: int, state: Any) -> None:
        self._before.discard(number)
        if number == self._done and not self._beyond:
            self._pass(state)
        elif number >= self._done:  # else it is of a reader that has ended
            self._beyond[number] = state
            self._advance()

    def _advance(self) -> None:
        """Pass what was delivered, and what ended readers will not deliver."""
        while self._beyond:
            if self._done in self._beyond:
                self._pass(self._beyond.pop(self._done))
            elif self._done % self._readers in self._ended:
                self._done += 1
            else:
                return

    def _pass(self, state: Any) -> None:
        if state is not None:
            self._states[self._done % self._readers] = state
        self._done += 1
