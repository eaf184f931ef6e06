"""What a loader chooses while it runs: measured here, decided in ``_observe.autotune``.

The loop that reads changes how many samples it reads at a time; the consumer's thread
changes how many batches are requested ahead.
"""

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aioloader._observe.autotune import Controller, Held, Observation
from aioloader._observe.machine import memory_left

if TYPE_CHECKING:
    from collections.abc import Sized

# A setting is measured over half as many reads as are under way, and not over fewer
# reads, or a shorter time, than these.
_READS = 16
_SECONDS_OF_READS = 0.005
# The same for batches.
_BATCHES = 8
_SECONDS_OF_BATCHES = 0.02
# Batches after which the memory that is left is asked for again.
_LOOK = 64


@dataclass
class Figures:
    """What an iteration has achieved.

    Attributes:
        began: When its first batch was taken.
        latest: When its latest was.
        batches: How many were taken after the first one.
        waited: Seconds that the consumer waited for them.
    """

    began: float = 0.0
    latest: float = 0.0
    batches: int = 0
    waited: float = 0.0


class Tuning:
    """What a loader has found out, in all its epochs.

    Attributes:
        controllers: By the names of arguments.
        held: The sizes of batches; None before the first iteration that needs them.
        figures: Of the latest iteration.
        deaths: Deaths of workers that were seen.
    """

    def __init__(self) -> None:
        self.controllers: dict[str, Controller] = {}
        self.held: Held | None = None
        self.figures: Figures = Figures()
        self.deaths: int = 0

    def controller(self, name: str, start: int, least: int, most: int) -> Controller:
        """Return the controller of an argument, made once."""
        found = self.controllers.get(name)
        if found is None:
            found = self.controllers[name] = Controller(name, start, least, most)
        return found

    def observe_workers(self, controller: Controller, deaths: int) -> None:
        """Decide about the number of workers, after an epoch.

        Args:
            controller: Of their number.
            deaths: Workers that have died so far.
        """
        figures, self.figures = self.figures, Figures()
        died, self.deaths = deaths - self.deaths, deaths
        seconds = figures.latest - figures.began
        if figures.batches < _BATCHES or seconds < _SECONDS_OF_BATCHES:
            return
        seen = Observation(
            rate=figures.batches / seconds,
            waited=figures.waited / seconds,
            failures=min(1.0, died / controller.value),
        )
        controller.observe(seen)


class _Window(Protocol):
    batches: int
    samples: int
    is_lazy: bool
    most: int


AnyWindow = TypeVar("AnyWindow", bound=Any)


@dataclass
class _Round:
    """Reads that are measured together."""

    began: float
    failures: int
    is_settled: bool
    reads: int = 0
    seconds: float = 0.0
    starved: int = 0


class Tuner:
    """Measure one iteration, and change what the loader chooses.

    Args:
        tuning: What the loader has found out.
        concurrency: Chooses how many samples are read at a time; or None.
        prefetch: Chooses how many batches are requested ahead, per reader; or None.
        given: How many of them the window has that an iteration begins with.
        readers: How many readers have a window.
        batch_size: Samples of a batch.
        prefetch_bytes: How many bytes may be held; None: what the memory allows.

    Attributes:
        ready: What the consumer takes batches from.
    """

    def __init__(  # noqa: PLR0913  (keywords, each of one thing)
        self,
        tuning: Tuning,
        *,
        concurrency: Controller | None,
        prefetch: Controller | None,
        given: int,
        readers: int,
        batch_size: int,
        prefetch_bytes: int | None,
    ) -> None:
        self.concurrency = concurrency
        self._prefetch = prefetch
        self._given = given
        self._readers = readers
        self._batch_size = batch_size
        self._prefetch_bytes = prefetch_bytes
        self.ready: Sized = ()
        if tuning.held is None:
            tuning.held = Held(0)
        self._held = tuning.held
        self._figures = tuning.figures = Figures()
        self._first_waited = 0.0
        self._look_at_memory()
        self._most_concurrency = concurrency.most if concurrency else 0
        self._hard = self._most_concurrency, prefetch.most if prefetch else 0
        self._round: _Round | None = None
        self._has_changed = True
        # When, at which batch, after how much waiting this period began.
        self._period = 0.0, 0, 0.0
        self._on_device = 0

    # -- reads, on the loop -------------------------------------------------------

    def note_read(self, began: float, *, failures: int, is_busy: bool) -> int:
        """Note that a read has ended; return how many may be under way.

        By Little's law, reads that are always as many under way achieve their number
        by their mean latency: batches that arrive in bursts do not blur that.

        Args:
            began: When it began, by ``time.perf_counter``.
            failures: Reads that have failed so far.
            is_busy: Whether as many are under way as may be, and more are to come.
        """
        controller = self.concurrency
        assert controller is not None
        if controller.most != self._most_concurrency:
            reason = f"{self._held.most:,} bytes hold no more samples"
            if controller.limit(self._most_concurrency, reason):
                self._round = None
        now, current = time.perf_counter(), self._round
        if not is_busy or current is None:
            # If others were under way before, the first reads meet fewer than later.
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
        is_long = now - current.began >= _SECONDS_OF_READS
        if is_long and current.reads >= max(_READS, controller.value // 2):
            latency = current.seconds / current.reads
            seen = Observation(
                rate=controller.value / latency,
                waited=current.starved / current.reads,
                latency=latency,
                failures=min(1.0, (failures - current.failures) / current.reads),
            )
            self._has_changed = controller.observe(seen) is not None
            self._round = None
        return controller.value

    # -- batches, in the consumer's thread --------------------------------------------

    def begin(self, window: AnyWindow) -> AnyWindow:
        """Return the window to begin with."""
        if self._prefetch is not None:
            self._on_device = window.batches - self._readers * self._given
        return self._fitted(window)

    def note_batch(self, batch: Any, window: AnyWindow, waited: float) -> AnyWindow:
        """Note that a batch was taken; return the window from now on.

        Args:
            batch: The batch, or None.
            window: The present window.
            waited: Seconds that the consumer has waited so far.
        """
        figures, now = self._figures, time.perf_counter()
        if batch is not None:
            self._held.note(batch)
        if not figures.began:
            figures.began, self._first_waited = now, waited
            self._period = now, 0, waited
        else:
            figures.batches += 1
        figures.latest, figures.waited = now, waited - self._first_waited
        if figures.batches % _LOOK == _LOOK - 1:
            self._look_at_memory()
        if window.is_lazy:
            return window
        self._observe_window(window, now, waited)
        return self._fitted(window)

    def _observe_window(self, window: _Window, now: float, waited: float) -> None:
        prefetch, batches = self._prefetch, self._figures.batches
        began, first, before = self._period
        seconds, taken = now - began, batches - first
        long = max(_BATCHES, 2 * window.batches)
        if prefetch is None or taken < long or seconds < _SECONDS_OF_BATCHES:
            return
        self._period = now, batches, waited
        if self.concurrency is None or not self.concurrency.is_trying:
            rate, share = taken / seconds, (waited - before) / seconds
            prefetch.observe(Observation(rate, waited=min(1.0, share)))

    def _fitted(self, window: AnyWindow) -> AnyWindow:
        """Return the window as it was decided, within the bytes that may be held."""
        batches, samples, most = window.batches, window.samples, self._most_batches()
        prefetch, reading = self._prefetch, self.concurrency
        if self._held.greatest:
            self._limit(most)
        if prefetch is not None and not window.is_lazy:
            batches = self._readers * prefetch.value + self._on_device
        if reading is not None and samples:
            # What is to be tried next finds samples to read.
            samples = reading.value * (2 if reading.is_trying else 1)
        if (batches, samples, most) == (window.batches, window.samples, window.most):
            return window
        made: AnyWindow = type(window)(
            batches,
            samples=samples,
            is_lazy=window.is_lazy,
            per_hop=window.per_hop,
            most=most,
        )
        return made

    def _limit(self, most: int) -> None:
        """Have no controller go beyond what fits."""
        concurrency, prefetch = self._hard
        samples = self._held.most * self._batch_size // self._held.greatest
        self._most_concurrency = max(1, min(concurrency, samples))
        if self._prefetch is not None:
            fitting = min(prefetch, max(1, most - self._on_device) // self._readers)
            reason = f"{self._held.most:,} bytes hold {most} batches"
            self._prefetch.limit(fitting, reason)

    def _most_batches(self) -> int:
        is_unknown = not self._held.greatest and self._prefetch_bytes is None
        return sys.maxsize if is_unknown else self._held.batches()

    def _look_at_memory(self) -> None:
        """Bound what is held: by half of the memory that this process could use."""
        left = memory_left() // 2
        given = self._prefetch_bytes
        self._held.most = left if given is None else min(left, given)
