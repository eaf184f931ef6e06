"""Measure the lag of an event loop that reads samples, and find what blocks it.

A timer on the loop is due at regular intervals. If it is late, the loop was blocked, so
the share of late timers is the share of time in which it was blocked. Only if that
happens often, and a reader asks for it, a thread watches for a while what runs on the
loop when a timer is overdue, and counts the coroutines that it finds there twice in a
row. It counts none while the loop's thread waits for a processor, or for the
interpreter's lock: then the watching thread waits for it too.
"""

import asyncio
import contextlib
import inspect
import logging
import math
import operator
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from aioloader._base.forks import fork_safe
from aioloader._base.machine import RunTimes, run_times
from aioloader._base.records import Counters, LoopLag

# Seconds between two timers.
_EVERY = 0.02
# Seconds that a timer may be late on a loop that is not blocked: loop clocks are
# coarse, and other threads take the GIL.
_TOLERANCE = 0.006
# The thread starts after this many late timers within this many seconds in which the
# loop was not blocked (an import blocks a loop only once), and ends after this many
# seconds without one.
_SUSPECT, _WITHIN = 5, 2.0
_CALM = 1.0
# The thread's interval in seconds; how many finds it takes to name a coroutine; and
# after how many finds, for how many seconds, the thread leaves that loop alone.
_LOOK = 0.003
_NAMED = 5
_ENOUGH, _REST = 100, 10.0
# Seconds that the thread waits for the lock only if another one holds it.
_LOCKED = 0.002
# Late timers whose lateness is kept.
_KEPT = 256
# Missed timers that a late one counts for, at most: the loop may have been stopped.
_MOST = 50

_COROUTINES = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_PACKAGE = str(Path(__file__).parents[1])
_LOG = logging.getLogger("aioloader")


class WatchCounts(NamedTuple):
    """What a watch has counted."""

    timers: int = 0  # how many timers were due, including missed ones
    late: int = 0  # how many of these were late
    times: int = 0  # how often it was late; each counts the timers missed meanwhile
    watched: float = 0.0  # seconds that it has watched
    busy: float = 0.0  # seconds of these in which the loop's thread was ready to run


class LoopWatch:
    """The timer of one loop, which runs while samples are read there."""

    def __init__(self, *, is_callers: bool) -> None:
        self.is_callers = is_callers
        self.counts: WatchCounts = WatchCounts()  # what was counted so far
        self.due: float = 0.0  # when the timer is due, by ``time.monotonic``
        self.thread: int = 0  # the thread that runs the loop
        self.native: int = 0  # the same, as the kernel numbers it
        # How often each coroutine was found while the loop was blocked; ``""``: its
        # thread waited for a processor or the interpreter's lock.
        self.found: Counter[str] = Counter()
        self._lateness: deque[float] = deque(maxlen=_KEPT)
        # When the latest timers were late, also in seconds that it was not blocked.
        self._late_at = deque([(0.0, -math.inf)] * _SUSPECT, maxlen=_SUSPECT)
        self._free = 0.0
        self._readers: list[Counters] = []
        # Whether it was often blocked, and nobody asked by what.
        self._is_unseen = False
        self._rests_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._clocks = 0.0, RunTimes()  # of the latest timer: wall, and the thread's
        # While it was late; a thread that waits for a processor is not held.
        self._held = self._computed = 0.0

    @contextlib.contextmanager
    def reading(self, since: float, counters: Counters) -> Iterator[None]:
        """Watch during the ``with`` block, which started then; called on the loop."""
        self._readers.append(counters)
        if len(self._readers) == 1:
            self.thread = threading.get_ident()
            self.native = threading.get_native_id()
            self.due = since
            self._clocks = time.monotonic(), run_times()
            self._set()
        try:
            yield
        finally:
            self._readers.remove(counters)
            if not self._readers and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def lag(self, since: WatchCounts) -> LoopLag | None:
        """Return how the loop was blocked; None if this is not yet measured."""
        counts = self.counts  # before lateness: the loop's thread may add to both
        timers, late, times, watched, busy = map(operator.sub, counts, since)
        if not timers:
            return None
        lateness = sorted([*self._lateness][-times:]) if times else [0.0]
        ((name, most),) = self.found.most_common(1) or [("", 0)]
        is_named = most >= _NAMED and most > self.found[""]
        return LoopLag(
            seconds=lateness[int(0.95 * (len(lateness) - 1))],
            share=min(1.0, late / timers),
            culprit=name if is_named else "",
            computes=self.computes(),
            is_callers=self.is_callers,
            busy=busy / watched if watched > 0 else 0.0,
            is_unseen=self._is_unseen,
        )

    def computes(self) -> bool:
        """Tell whether the loop's thread computes while its timers are late."""
        return self._computed > self._held / 5

    def is_suspect(self) -> bool:
        """Tell whether the thread should watch what runs on the loop."""
        now = time.monotonic()
        is_calm = now - self._late_at[-1][0] > _CALM
        return self._is_asked() and not is_calm and now >= self._rests_until

    def blame(self, code: CodeType | None) -> None:
        """Count a coroutine that was found; old counts are halved from time to time.

        None: the thread waited for a processor or the lock.
        """
        name = "" if code is None else _name(code)
        self.found[name] += 1
        if name and self.found[name] == _NAMED:
            _LOG.debug("%s blocks the event loop that reads samples", name)
        if self.found.total() >= _ENOUGH:
            halved = {name: count // 2 for name, count in self.found.items()}
            self.found = Counter(halved)
            self._rests_until = time.monotonic() + _REST

    def _is_asked(self) -> bool:
        return any(counters.is_asked for counters in self._readers)

    def _set(self) -> None:
        self.due += _EVERY
        loop = asyncio.get_running_loop()
        seconds = max(0.0, self.due - time.monotonic())
        self._timer = loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        now, own = time.monotonic(), run_times()
        seconds, spent = now - self._clocks[0], own - self._clocks[1]
        self._clocks = now, own
        behind = now - self.due
        missed = int(behind / _EVERY)  # it would have been due again, and late
        self.due += missed * _EVERY
        is_late, counted = behind > _TOLERANCE, 1 + min(missed, _MOST)
        self._free += seconds - max(0.0, behind)
        timers, late, times, watched, busy = self.counts
        if is_late:
            self._lateness.append(behind)
            self._late_at.append((now, self._free))
            self._held += seconds - spent.delayed
            self._computed += spent.cpu
        self.counts = WatchCounts(
            timers + counted,
            late + counted * is_late,
            times + is_late,
            watched + seconds,
            busy + spent.cpu + spent.delayed,
        )
        is_often = self._free - self._late_at[0][1] < _WITHIN
        if is_late and is_often:
            self._is_unseen = not self._is_asked()
            if self.is_suspect():
                _look_at(self)
        self._set()


_WATCHES: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWatch]" = (
    weakref.WeakKeyDictionary()
)
# The watches of blocked loops, watched by one thread for all.
_suspects: set[LoopWatch] = set()
_lookers: list[threading.Thread] = []
_LOCK = fork_safe(threading.Lock())


def watch_of(loop: asyncio.AbstractEventLoop, *, is_callers: bool) -> LoopWatch:
    """Return the watch of a loop, shared by all its readers."""
    watch = _WATCHES.get(loop)
    if watch is None:
        watch = _WATCHES.setdefault(loop, LoopWatch(is_callers=is_callers))
    return watch


def _look_at(watch: LoopWatch) -> None:
    with _LOCK:
        # A forked child has a copy of the suspects, but not the thread.
        is_looked_for = bool(_suspects) and all(one.is_alive() for one in _lookers)
        _suspects.add(watch)
        if is_looked_for:
            return
        looker = threading.Thread(target=_look, name="aioloader-watch", daemon=True)
        _lookers[:] = [looker]
        looker.start()


def _look() -> None:
    """Find what blocks the suspect loops, until there are none."""
    # The last find and its timer count. The same coroutine twice means one long call,
    # or many short ones between which the timer could not run.
    seen: dict[LoopWatch, tuple[CodeType, int]] = {}
    before: dict[LoopWatch, RunTimes] = {}
    locked, since = 0.0, time.monotonic()
    while True:
        with _LOCK:
            suspects = [watch for watch in _suspects if watch.is_suspect()]
            _suspects.intersection_update(suspects)
            if not suspects:
                return
        found: dict[LoopWatch, tuple[CodeType, int]] = {}
        seconds, since = time.monotonic() - since, time.monotonic()
        for watch in suspects:
            times = run_times(watch.native)
            spent, before[watch] = times - before.get(watch, times), times
            if time.monotonic() < watch.due + _TOLERANCE:
                continue
            stopped = max(locked if locked > _LOCKED else 0.0, spent.delayed)
            # The kernel's times of another thread are coarse; its own are not.
            if stopped > max(4 * spent.cpu, seconds / 4) and not watch.computes():
                watch.blame(None)
                continue
            code = _running(watch.thread)
            if code is not None:
                found[watch] = code, watch.counts.timers
                if seen.get(watch) == found[watch]:
                    watch.blame(code)
        seen = found
        locked = _sleep()


def _sleep() -> float:
    """Sleep between two looks; return how long the lock took to get afterwards."""
    began, times = time.monotonic(), run_times()
    time.sleep(_LOOK)
    late = time.monotonic() - began - _LOOK
    return late - (run_times() - times).delayed


def _running(thread: int) -> CodeType | None:
    """Return the code of a thread's innermost coroutine that is not ours.

    The user's own code is preferred to a library that it calls.
    """
    frame: FrameType | None = sys._current_frames().get(thread)  # noqa: SLF001
    found: CodeType | None = None
    while frame is not None:
        place = frame.f_code.co_filename
        is_coroutine = frame.f_code.co_flags & _COROUTINES
        if is_coroutine and not place.startswith(_PACKAGE):
            if not place.startswith(_installed()):
                return frame.f_code
            found = found or frame.f_code
        frame = frame.f_back
    return found


@cache
def _installed() -> tuple[str, ...]:
    """Return where Python's own modules and installed ones are."""
    import sysconfig

    return tuple(map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))


def _name(code: CodeType) -> str:
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"
