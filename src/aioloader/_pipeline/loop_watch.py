"""Measure the lag of an event loop that reads samples, and find what blocks it.

A timer on the loop is due at regular intervals. The share of late timers approximates
the share of time in which the loop was blocked. If timers are often late and a reader
asks for the culprit, a thread samples what runs on the loop while a timer is overdue.
The thread counts coroutines that it sees twice in a row, but none while the loop's
thread waits for a processor or for the GIL.
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
_INTERVAL = 0.02
# How many seconds late a timer may be on a loop that is not blocked, because loop
# clocks are coarse and other threads take the GIL.
_TOLERANCE = 0.006
# The sampling thread starts after ``_SUSPICIOUS`` late timers within ``_WITHIN``
# seconds in which the loop was not blocked (an import blocks a loop only once). It ends
# after ``_CALM`` seconds without a late timer.
_SUSPICIOUS, _WITHIN = 5, 2.0
_CALM = 1.0
# The sampling interval in seconds; how many samples name a coroutine; after how many
# samples of a loop the thread ignores the loop, and for how many seconds.
_SAMPLE_EVERY = 0.003
_MIN_SAMPLES = 5
_MAX_SAMPLES, _PAUSE = 100, 10.0
# Longer waits for the GIL, in seconds, mean that another thread holds it.
_GIL_SECONDS = 0.002
# How many late timers are remembered.
_KEPT = 256
# The most missed timers to count with a late one: the loop may have been stopped.
_MAX_MISSED = 50

_COROUTINES = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_PACKAGE = str(Path(__file__).parents[1])
_LOG = logging.getLogger("aioloader")


class WatchCounts(NamedTuple):
    """The totals of a ``LoopWatch`` since it was created."""

    timers: int = 0  # how many timers were due, including missed ones
    late: int = 0  # how many of these were late
    times: int = 0  # how many late timers ran; excludes missed timers
    watched: float = 0.0  # seconds watched
    busy: float = 0.0  # seconds of these in which the loop's thread was ready to run


class LoopWatch:
    """The lag timer of one event loop; it runs while samples are read there."""

    def __init__(self, *, is_callers: bool) -> None:
        self.is_callers = is_callers
        self.counts: WatchCounts = WatchCounts()
        self.due: float = 0.0  # when the timer is due, by ``time.monotonic``
        self.thread: int = 0  # the thread that runs the loop
        self.native: int = 0  # the kernel's number of that thread
        # How often each coroutine was sampled while the loop was blocked; ``""``: its
        # thread waited for a processor or the GIL.
        self.samples: Counter[str] = Counter()
        self._lateness: deque[float] = deque(maxlen=_KEPT)
        # When timers were late, by the clock and in seconds without blocking.
        self._late_at = deque([(0.0, -math.inf)] * _SUSPICIOUS, maxlen=_SUSPICIOUS)
        self._unblocked = 0.0  # seconds in which the loop was not blocked
        self._readers: list[Counters] = []
        self._is_unseen = False  # often blocked, but no reader wants to know why
        self._ignored_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._clocks = 0.0, RunTimes()  # of the latest timer: wall, and the thread's
        # Seconds up to late timers: without waits for a processor; computing.
        self._late_seconds = self._late_cpu = 0.0

    @contextlib.contextmanager
    def reading(self, since: float, counters: Counters) -> Iterator[None]:
        """Watch the running loop from ``since`` to the end of the ``with`` block."""
        self._readers.append(counters)
        if len(self._readers) == 1:
            self.thread = threading.get_ident()
            self.native = threading.get_native_id()
            self.due = since
            self._clocks = time.monotonic(), run_times()
            self._set_timer()
        try:
            yield
        finally:
            self._readers.remove(counters)
            if not self._readers and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def lag(self, since: WatchCounts) -> LoopLag | None:
        """Return the loop's lag since earlier counts; None if no timer was due."""
        counts = self.counts  # before lateness: the loop's thread may add to both
        timers, late, times, watched, busy = map(operator.sub, counts, since)
        if not timers:
            return None
        lateness = sorted([*self._lateness][-times:]) if times else [0.0]
        ((name, most),) = self.samples.most_common(1) or [("", 0)]
        is_named = most >= _MIN_SAMPLES and most > self.samples[""]
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
        return self._late_cpu > self._late_seconds / 5

    def is_suspect(self) -> bool:
        """Tell whether the sampling thread should sample what runs on the loop."""
        now = time.monotonic()
        is_calm = now - self._late_at[-1][0] > _CALM
        return self._is_asked() and not is_calm and now >= self._ignored_until

    def blame(self, code: CodeType | None) -> None:
        """Count a sample of a coroutine; after many, halve the counts and pause.

        ``code`` is None if the loop's thread waited for a processor or the GIL.
        """
        name = "" if code is None else _name(code)
        self.samples[name] += 1
        if name and self.samples[name] == _MIN_SAMPLES:
            _LOG.debug("%s blocks the event loop that reads samples", name)
        if self.samples.total() >= _MAX_SAMPLES:
            halved = {name: count // 2 for name, count in self.samples.items()}
            self.samples = Counter(halved)
            self._ignored_until = time.monotonic() + _PAUSE

    def _is_asked(self) -> bool:
        return any(counters.is_asked for counters in self._readers)

    def _set_timer(self) -> None:
        self.due += _INTERVAL
        loop = asyncio.get_running_loop()
        seconds = max(0.0, self.due - time.monotonic())
        self._timer = loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        now, own = time.monotonic(), run_times()
        seconds, spent = now - self._clocks[0], own - self._clocks[1]
        self._clocks = now, own
        lateness = now - self.due
        missed = int(lateness / _INTERVAL)  # these timers were due meanwhile
        self.due += missed * _INTERVAL
        is_late, counted = lateness > _TOLERANCE, 1 + min(missed, _MAX_MISSED)
        self._unblocked += seconds - max(0.0, lateness)
        timers, late, times, watched, busy = self.counts
        if is_late:
            self._lateness.append(lateness)
            self._late_at.append((now, self._unblocked))
            self._late_seconds += seconds - spent.delayed
            self._late_cpu += spent.cpu
        self.counts = WatchCounts(
            timers + counted,
            late + counted * is_late,
            times + is_late,
            watched + seconds,
            busy + spent.cpu + spent.delayed,
        )
        is_often = self._unblocked - self._late_at[0][1] < _WITHIN
        if is_late and is_often:
            self._is_unseen = not self._is_asked()
            if self.is_suspect():
                _sample(self)
        self._set_timer()


_WATCHES: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWatch]" = (
    weakref.WeakKeyDictionary()
)
# The watches of blocked loops, and the one thread that samples all of them.
_suspects: set[LoopWatch] = set()
_samplers: list[threading.Thread] = []
_LOCK = fork_safe(threading.Lock())


def watch_of(loop: asyncio.AbstractEventLoop, *, is_callers: bool) -> LoopWatch:
    """Return the watch of a loop, shared by all pipelines that read there."""
    watch = _WATCHES.get(loop)
    if watch is None:
        watch = _WATCHES.setdefault(loop, LoopWatch(is_callers=is_callers))
    return watch


def _sample(watch: LoopWatch) -> None:
    """Add ``watch`` to ``_suspects``; start the sampling thread if none runs."""
    with _LOCK:
        # A forked child has a copy of the suspects, but not the thread.
        is_running = bool(_suspects) and all(thread.is_alive() for thread in _samplers)
        _suspects.add(watch)
        if is_running:
            return
        thread = threading.Thread(target=_run, name="aioloader-watch", daemon=True)
        _samplers[:] = [thread]
        thread.start()


def _run() -> None:
    """Sample the suspect loops until there are none; the sampling thread runs this."""
    # The last sample, and the timers counted then. The same coroutine twice means one
    # long call, or many short ones between which the timer could not run.
    seen: dict[LoopWatch, tuple[CodeType, int]] = {}
    before: dict[LoopWatch, RunTimes] = {}
    locked, since = 0.0, time.monotonic()
    while True:
        with _LOCK:
            suspects = [watch for watch in _suspects if watch.is_suspect()]
            _suspects.intersection_update(suspects)
            if not suspects:
                return
        running: dict[LoopWatch, tuple[CodeType, int]] = {}
        seconds, since = time.monotonic() - since, time.monotonic()
        for watch in suspects:
            times = run_times(watch.native)
            spent, before[watch] = times - before.get(watch, times), times
            if time.monotonic() < watch.due + _TOLERANCE:
                continue
            waited = max(locked if locked > _GIL_SECONDS else 0.0, spent.delayed)
            # The kernel's times of another thread are coarse, so ask the watch, too.
            if waited > max(4 * spent.cpu, seconds / 4) and not watch.computes():
                watch.blame(None)
                continue
            code = _running(watch.thread)
            if code is not None:
                running[watch] = code, watch.counts.timers
                if seen.get(watch) == running[watch]:
                    watch.blame(code)
        seen = running
        locked = _sleep()


def _sleep() -> float:
    """Sleep until the next sample; return how long the wake-up waited for the GIL."""
    began, times = time.monotonic(), run_times()
    time.sleep(_SAMPLE_EVERY)
    late = time.monotonic() - began - _SAMPLE_EVERY
    return late - (run_times() - times).delayed


def _running(thread: int) -> CodeType | None:
    """Return a thread's innermost coroutine outside this package.

    The user's own code is preferred to a library that it calls.
    """
    frame: FrameType | None = sys._current_frames().get(thread)  # noqa: SLF001
    of_library: CodeType | None = None
    while frame is not None:
        path = frame.f_code.co_filename
        is_coroutine = frame.f_code.co_flags & _COROUTINES
        if is_coroutine and not path.startswith(_PACKAGE):
            if not path.startswith(_installed()):
                return frame.f_code
            of_library = of_library or frame.f_code
        frame = frame.f_back
    return of_library


@cache
def _installed() -> tuple[str, ...]:
    """Return the folders of the standard library and of installed packages."""
    import sysconfig

    return tuple(map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))


def _name(code: CodeType) -> str:
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"
