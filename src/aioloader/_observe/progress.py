"""A progress display for ``for`` and ``async for`` that shows rates and waiting.

``progress(loader)`` yields the loader's batches and reads ``loader.stats()`` at most
twice a second. The display shows a batch only when the consumer requests the next one,
so that nothing runs between a batch's arrival and its delivery: an interrupt there
would lose the batch.
"""

import importlib
import logging
import operator
import shutil
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, Generic, TextIO

from typing_extensions import TypeVar

from aioloader.protocols import OneIteration

Batch = TypeVar("Batch", default=Any)

clock = time.perf_counter
# Seconds between two updates of a display, and between two lines of the log.
SHOWN_EVERY = 0.5
LOGGED_EVERY = 60.0
# A display's rates are averages over this many updates.
_RATE_UPDATES = 20
# The next computation of statistics waits for this many times the last one's duration.
_IDLE_TIMES = 1000
_log = logging.getLogger("aioloader")
# When each loader last logged a line, kept because epochs may be below a minute.
_logged: "weakref.WeakKeyDictionary[Any, float]" = weakref.WeakKeyDictionary()


def progress(
    loader: Iterable[Batch],
    *,
    total: int | None = None,
    desc: str | None = None,
    leave: bool = True,
    file: TextIO | None = None,
) -> "WithProgress[Batch]":
    """Iterate over a loader and show its progress.

    A terminal or notebook shows a bar if tqdm is installed, otherwise one line: the
    batches so far, samples and bytes per second, the share of time spent waiting for
    batches, and the position where an epoch resumed. Elsewhere nothing is printed, but
    the logger ``"aioloader"`` gets a line per minute at level INFO.

    Example:
        >>> from aioloader import DataLoader, progress
        >>> [batch.tolist() for batch in progress(DataLoader([1, 2, 3], batch_size=2))]
        [[1, 2], [3]]

    Args:
        loader: A ``DataLoader``; each iteration iterates over it once.
        total: Number of batches per epoch; ``None``: ``len(loader)``, if known.
        desc: Text before the bar or line.
        leave: Whether the display stays after the iteration.
        file: Where to show the display; ``None``: ``sys.stderr``.

    Returns:
        An iterable for ``for`` and ``async for``; it can be iterated repeatedly.

    Raises:
        TypeError: If ``loader`` has no method ``stats``.
    """
    if not hasattr(loader, "stats"):
        raise TypeError(f"progress needs an aioloader.DataLoader, got {type(loader)}")
    new_meter = partial(Meter, loader, total, desc, leave, file)
    return WithProgress(loader, new_meter)


class WithProgress(Generic[Batch]):
    """The iterable that ``progress`` returns; each iteration has a new display."""

    def __init__(self, loader: Any, new_meter: "Callable[[], Meter]") -> None:
        self._loader = loader
        self._new_meter = new_meter

    def __len__(self) -> int:
        """Return ``len(loader)``; raise as the loader does if it has no length."""
        return len(self._loader)

    def __iter__(self) -> "ProgressIterator[Batch]":
        return ProgressIterator(iter(self._loader), self._new_meter())

    def __aiter__(self) -> "ProgressIterator[Batch]":
        return ProgressIterator(aiter(self._loader), self._new_meter())


class ProgressIterator(OneIteration, Generic[Batch]):
    """A loader's iterator with a display; both end together.

    Like the loader's iterator, it releases everything when it is deleted. ``close`` and
    ``aclose`` wait for the release. No frame of a traceback keeps a reference to it.
    """

    def __init__(self, batches: Any, meter: "Meter") -> None:
        self._batches = batches
        self._meter = meter
        # At the interpreter's exit the display is not closed.
        weakref.finalize(self, meter.close).atexit = False

    def __iter__(self) -> "ProgressIterator[Batch]":
        return self

    def __aiter__(self) -> "ProgressIterator[Batch]":
        return self

    def __next__(self) -> Batch:
        meter = self._meter
        try:
            if clock() >= meter.due:
                meter.look()
            batch: Batch = next(self._batches)
        except StopIteration:
            meter.finish()
            raise
        finally:
            del self
        meter.batches += 1
        return batch  # no call here: an interrupt would lose the batch

    async def __anext__(self) -> Batch:
        meter = self._meter
        try:
            if clock() >= meter.due:
                meter.look()
            batch: Batch = await self._batches.__anext__()
        except StopAsyncIteration:
            meter.finish()
            raise
        finally:
            del self
        meter.batches += 1
        return batch

    def close(self) -> None:
        """End the iteration and its display; wait until everything is released."""
        self._meter.close()
        self._batches.close()

    async def aclose(self) -> None:
        """End the iteration and its display without blocking the loop."""
        self._meter.close()
        await self._batches.aclose()


class Meter:
    """The progress of one iteration, its display, and the time of the next update."""

    def __init__(
        self,
        loader: Any,
        total: int | None,
        desc: str | None,
        leave: bool,  # noqa: FBT001  (of ``progress``)
        file: TextIO | None,
    ) -> None:
        if total is None:  # a stream has no length
            with suppress(TypeError, AttributeError, NotImplementedError):
                total = len(loader)
        self.batches = 0  # delivered in this iteration
        self.total: int | None = total
        self.resumed: int = 0  # number of the batch where it started
        self.rates: str = ""
        self._loader = loader
        self._desc = desc
        self._make_display = _display_of(file, desc=desc, leave=leave)
        self._display: Any = None  # made when there is something to show
        self.began: float = clock()
        self.due: float = self.began  # when to update next; infinite when closed
        looks = 1 + _RATE_UPDATES
        if self._make_display is None:
            self.due = _logged.setdefault(loader, self.began) + LOGGED_EVERY
            looks = 2
        # For each of the latest updates: time, batches, total seconds of waiting.
        self._looks = deque([(self.began, 0, 0.0)], maxlen=looks)
        self._next_measure: float = self.began
        self._epoch: int | None = None
        self._shown = 0  # batches shown

    def look(self) -> None:
        now = clock()
        self.due = now + SHOWN_EVERY
        if self._make_display is None:
            _logged[self._loader] = now
            self.due = now + LOGGED_EVERY
        if not self.batches:
            return
        if now >= self._next_measure:
            self._measure(now)
            self._next_measure = now + _IDLE_TIMES * (clock() - now)
        self._show()

    def finish(self) -> None:
        """Show the final number of batches and rates, and close the display."""
        try:
            if self.batches and self.due < inf and self._make_display is not None:
                self._measure(clock())
                self._show()
        finally:
            self.close()

    def close(self) -> None:
        """Close the display. Called by finalizers, so it does not use the loader."""
        is_open, self.due = self.due < inf, inf
        if self._display is None or not is_open:
            return
        try:
            if self._shown < self.batches:
                self._show()
        finally:
            with suppress(OSError, ValueError):
                self._display.close()

    def __str__(self) -> str:
        batches, total = self.resumed + self.batches, self.total
        text = f"{batches:,} batches"
        if total is not None:
            text = f"{batches:,} of {total:,} batches"
            if 0 < batches <= total:
                text += f" ({batches / total:.0%})"
        text = f"{text}, {self.rates}" if self.rates else text
        return text if self._desc is None else f"{self._desc}: {text}"

    def _show(self) -> None:
        self._shown = self.batches
        if self._make_display is None:
            _log.info("%s", str(self))  # it may be formatted later
            return
        with suppress(OSError, ValueError):  # the terminal was closed
            if self._display is None:
                self._display = self._make_display(self)
            self._display.show(self)

    def _measure(self, now: float) -> None:
        """Set ``rates`` to a text with the mean rates over the latest updates."""
        stats = self._loader.stats()
        if self._epoch is None:
            self.resumed = stats.resumed_at
        elif stats.epoch != self._epoch:  # another iteration of the loader has started
            self._looks.clear()
        self._epoch = stats.epoch
        self._looks.append((now, self.batches, stats.waited))
        seconds, batches, waited = map(operator.sub, self._looks[-1], self._looks[0])
        if seconds <= 0:
            return
        rate = batches / seconds
        words = [f"{_short(rate)} batches/s"]
        if stats.recent and stats.samples:
            words = [f"{_short(rate * stats.samples / stats.recent)} samples/s"]
        if stats.batch_bytes:
            words.append(f"{_short(rate * stats.batch_bytes)}B/s")
        words.append(f"waiting {min(1.0, max(0.0, waited / seconds)):.0%}")
        if self.resumed:
            words.append(f"resumed at {self.resumed:,}")
        self.rates = ", ".join(words)


class _Line:
    """A display without tqdm: one line of text, overwritten at each update."""

    def __init__(self, file: TextIO, *, leave: bool) -> None:
        self._file = file
        self._leave = leave
        self._width = 0

    def show(self, meter: Meter) -> None:
        text = str(meter)[: shutil.get_terminal_size().columns - 1]
        self._write("\r" + text.ljust(self._width))
        self._width = len(text)

    def close(self) -> None:
        self._write("\n" if self._leave else "\r" + " " * self._width + "\r")

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()


def _display_of(
    given: TextIO | None, *, desc: str | None, leave: bool
) -> Callable[[Meter], Any] | None:
    """Return a function that makes a display; None without a terminal or notebook."""
    file = sys.stderr if given is None else given
    is_seen = type(file).__module__.startswith("ipykernel.")
    with suppress(AttributeError, ValueError):  # no file, or a closed one
        is_seen = is_seen or file.isatty()
    if not is_seen:
        return None
    try:
        # A given file is not a notebook's cell, so it needs no widget.
        module = importlib.import_module("tqdm.auto" if given is None else "tqdm")
    except ImportError:
        return lambda _: _Line(file, leave=leave)
    # Interval 0: no monitor thread of tqdm.
    bar_class = type("Bar", (module.tqdm,), {"monitor_interval": 0, "show": _show_bar})
    options: dict[str, Any] = {"desc": desc, "leave": leave, "file": given}
    options |= {"unit": " batches", "mininterval": 0, "miniters": 0}
    options |= {"dynamic_ncols": True, "delay": 1e-9}  # it shows nothing when made

    def bar(meter: Meter) -> Any:
        made: Any = bar_class(total=meter.total, initial=meter.resumed, **options)
        made.start_t = made.last_print_t = time.time() - (clock() - meter.began)
        return made

    return bar


def _show_bar(bar: Any, meter: Meter) -> None:
    bar.set_postfix_str(meter.rates, refresh=False)
    bar.update(meter.resumed + meter.batches - bar.n)


def _short(number: float) -> str:
    """Format a number with three digits and a unit prefix, such as ``"12.3 k"``."""
    power = 0
    while abs(number) >= 999.5 and power < 4:
        number, power = number / 1000, power + 1
    return f"{number:.3g}{('', ' k', ' M', ' G', ' T')[power]}"
