"""Measurements for ``"auto"`` arguments, whose values ``autotune`` decides.

The loop that reads tunes the concurrency of reads; the consumer's thread tunes how many
batches are requested ahead.
"""

import sys
import time
from collections.abc import Sized
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from aioloader._base.machine import memory_left
from aioloader._base.records import Counters, RecordedSettings
from aioloader._pipeline.autotune import BytesInFlight, Controller, Observation
from aioloader._pipeline.batch_task import Window

# A value is measured over half as many reads as are in flight, but at least over this
# many reads and seconds.
_MIN_READS = 16
_MIN_READ_SECONDS = 0.005
# Batches: over twice as many as the window has, but at least over these.
_MIN_BATCHES = 8
_MIN_BATCH_SECONDS = 0.02
# Batches between two checks of the available memory.
_MEMORY_CHECK_EVERY = 64


@dataclass
class Tuning:
    """A loader's measurements and decisions, kept over all its epochs."""

    controllers: dict[str, Controller] = field(default_factory=dict)  # by argument name
    held: BytesInFlight = field(default_factory=partial(BytesInFlight, 0))
    deaths: int = 0  # worker deaths seen so far
    observed: object = None  # the latest iteration whose speed was observed

    def controller(self, name: str, start: int, least: int, most: int) -> Controller:
        """Return the controller of an argument; the first call makes it."""
        controller = self.controllers.get(name)
        if controller is None:
            controller = self.controllers[name] = Controller(name, start, least, most)
        return controller

    def tuned(self, setting: RecordedSettings) -> RecordedSettings:
        """Return the current settings of a loader that started with ``setting``."""
        chosen = {
            name: controller.value
            for name, controller in self.controllers.items()
            if name in setting.fixed
        }
        if "concurrency" in chosen:
            setting = replace(setting, concurrency=chosen["concurrency"])
        if "prefetch_factor" in chosen and setting.window:
            readers = max(1, setting.workers)
            batches = readers * chosen["prefetch_factor"]
            setting = replace(setting, window=batches + setting.on_device)
        return setting

    def observe_workers(
        self, controller: Controller, latest: Counters, deaths: int
    ) -> None:
        """Observe an iteration's speed once; ``deaths`` counts all deaths so far."""
        died, self.deaths = deaths - self.deaths, deaths
        is_known, self.observed = self.observed is latest.iteration, latest.iteration
        records = latest.recorded()
        if is_known or len(records) <= _MIN_BATCHES:
            return
        seconds = records[-1].taken - records[0].taken
        if seconds >= _MIN_BATCH_SECONDS:
            waited = sum(
                record.taken - record.asked - record.drawn for record in records[1:]
            )
            rate = (len(records) - 1) / seconds
            failures = min(1.0, died / controller.value)
            controller.observe(Observation(rate, waited / seconds, failures=failures))


@dataclass
class _Round:
    """One measurement over several reads, added up as they end."""

    began: float
    failures: int
    is_settled: bool
    reads: int = 0
    seconds: float = 0.0
    starved: int = 0


@dataclass(kw_only=True, eq=False, repr=False)
class Tuner:
    """The tuner of one iteration, which measures and sets ``"auto"`` arguments."""

    tuning: Tuning
    concurrency: Controller | None  # of the number of samples read at a time
    prefetch: Controller | None  # of the number of batches requested ahead per reader
    given: int  # batches per reader in the window that an iteration starts with
    readers: int  # how many readers the window is for
    batch_size: int
    prefetch_bytes: int | None  # held by batches; None: limited by memory
    ready: Sized = ()  # the queue that the consumer takes batches from

    def __post_init__(self) -> None:
        self._held = self.tuning.held
        self._check_memory()
        self._max_concurrency = self.concurrency.most if self.concurrency else 0
        # The upper bounds of both controllers, even for the smallest batches.
        self._bounds = self._max_concurrency, self.prefetch.most if self.prefetch else 0
        self._round: _Round | None = None
        self._has_changed = True
        self._taken = 0  # batches delivered
        # Start of the period: its time, batches taken and seconds waited so far.
        self._period = 0.0, 0, 0.0
        self._on_device = 0

    def note_read(self, began: float, *, failures: int, is_busy: bool) -> int:
        """Record that a read has ended; return how many reads may be in flight.

        By Little's law, the throughput of a constant number of reads is that number
        divided by their mean latency, even if batches come in bursts.

        Args:
            began: When the read started, by ``time.perf_counter``.
            failures: How many reads have failed so far.
            is_busy: Whether as many reads as allowed are in flight and more wait.
        """
        controller = self.concurrency
        assert controller is not None
        if controller.most != self._max_concurrency:
            reason = f"{self._held.most:,} bytes hold no more samples"
            if controller.limit(self._max_concurrency, reason):
                self._round = None
        now, current = time.perf_counter(), self._round
        if not is_busy or current is None:
            # After a change, the first reads still overlap with earlier ones.
            is_settled = not self._has_changed
            self._round = _Round(now, failures, is_settled) if is_busy else None
            return controller.value
        if began < current.began:
            return controller.value
        if not current.is_settled:
            self._round = _Round(now, failures, is_settled=True)
            return controller.value
        current.reads += 1
        current.seconds += now - began
        current.starved += not len(self.ready)
        is_long = now - current.began >= _MIN_READ_SECONDS
        if is_long and current.reads >= max(_MIN_READS, controller.value // 2):
            seen = Observation(
                rate=controller.value * current.reads / current.seconds,
                waited=current.starved / current.reads,
                failures=min(1.0, (failures - current.failures) / current.reads),
            )
            self._has_changed = controller.observe(seen) is not None
            self._round = None
        return controller.value

    def begin(self, window: Window) -> Window:
        """Return the window that the iteration starts with."""
        if self.prefetch is not None:
            self._on_device = window.batches - self.readers * self.given
        return self._fitted(window)

    def note_batch(self, batch: Any, window: Window, waited: float) -> Window:
        """Record a result, whose ``batch`` is None if empty; return the new window.

        ``waited``: seconds for which the consumer has waited in this iteration.
        """
        now = time.perf_counter()
        if batch is not None:
            self._held.note(batch)
        self._taken += 1
        if self._taken == 1:
            self._period = now, 1, waited
        if not self._taken % _MEMORY_CHECK_EVERY:
            self._check_memory()
        if window.is_lazy:
            return window
        began, first, before = self._period
        seconds, taken = now - began, self._taken - first
        is_long = taken >= max(_MIN_BATCHES, 2 * window.batches)
        if self.prefetch and is_long and seconds >= _MIN_BATCH_SECONDS:
            self._period = now, self._taken, waited
            if self.concurrency is None or not self.concurrency.is_trying:
                rate, share = taken / seconds, (waited - before) / seconds
                self.prefetch.observe(Observation(rate, waited=min(1.0, share)))
        return self._fitted(window)

    def _fitted(self, window: Window) -> Window:
        """Return the window with the controllers' values, limited by memory."""
        batches, samples, most = window.batches, window.samples, sys.maxsize
        prefetch, reading = self.prefetch, self.concurrency
        if self._held.greatest or self.prefetch_bytes is not None:
            most = self._held.batches()
        if self._held.greatest:
            self._limit(most)
        if prefetch is not None and not window.is_lazy:
            batches = self.readers * prefetch.value + self._on_device
        if reading is not None and samples:
            # The next value to try must find samples to read.
            samples = reading.value * (2 if reading.is_trying else 1)
        if (batches, samples, most) == (window.batches, window.samples, window.most):
            return window
        return replace(window, batches=batches, samples=samples, most=most)

    def _limit(self, most: int) -> None:
        """Limit both controllers, so that no more than ``most`` batches are held."""
        concurrency, prefetch = self._bounds
        samples = self._held.most * self.batch_size // self._held.greatest
        self._max_concurrency = max(1, min(concurrency, samples))
        if self.prefetch is not None:
            fitting = min(prefetch, max(1, most - self._on_device) // self.readers)
            reason = f"{self._held.most:,} bytes hold {most} batches"
            self.prefetch.limit(fitting, reason)

    def _check_memory(self) -> None:
        """Limit held bytes to half the available memory, and to ``prefetch_bytes``."""
        left = memory_left() // 2
        given = self.prefetch_bytes
        self._held.most = left if given is None else min(left, given)
