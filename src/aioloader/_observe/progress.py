"""A progress display for ``for`` and ``async for``: rates, and the share of waiting.

``progress(loader)`` passes on the loader's batches, one by one and in order, and reads
``loader.stats()`` at most twice a second. A batch is shown when the consumer asks for
the next one: nothing runs between a batch's arrival and its delivery, where an
interrupt would lose it.
"""

import importlib
import logging
import operator
import shutil
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from math import inf
from typing import Any, Generic, TextIO

from typing_extensions import TypeVar

Batch = TypeVar("Batch", default=Any)

clock = time.perf_counter
# Seconds between two updates: on a display, and in a log.
SHOWN_EVERY = 0.5
LOGGED_EVERY = 60.0
# Rates are taken over this many updates.
_LOOKS = 20
# Computing the figures takes at most a thousandth of the time.
_IDLE = 1000
_log = logging.getLogger("aioloader")
# When each loader last logged a line; its epochs may be shorter than a minute.
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

    On a terminal and in a notebook: a bar (with tqdm installed) or one line, with
    batches, samples and bytes per second, the share of time spent waiting for batches,
    and the position in a resumed epoch. Elsewhere nothing is printed; the logger
    ``"aioloader"`` gets a line per minute at level INFO.

    Example:
        >>> from aioloader import DataLoader, progress
        >>> [batch.tolist() for batch in progress(DataLoader([1, 2, 3], batch_size=2))]
        [[1, 2], [3]]

    Args:
        loader: A ``DataLoader``; each iteration starts one of the loader.
        total: Batches of an epoch; ``None`` is ``len(loader)``, if it has a length.
        desc: Prefix of the line.
        leave: Whether the display stays after the iteration.
        file: Where to show it; ``None`` is ``sys.stderr``.

    Returns:
        An iterable for ``for`` and ``async for``, any number of times.
    """
    return WithProgress(loader, total, desc, leave, file)


class WithProgress(Generic[Batch]):
    """The iterable that ``progress`` returns."""

    def __init__(
        self,
        loader: Any,
        total: int | None,
        desc: str | None,
        leave: bool,  # noqa: FBT001  (of ``progress``, by keyword)
        file: TextIO | None,
    ) -> None:
        self._loader = loader
        self._total = total
        self._desc = desc
        self._leave = leave
        self._file = file

    def __len__(self) -> int:
        """Return ``len(loader)``.

        Raises:
            TypeError: If the length is unknown.
        """
        return len(self._loader)

    def __iter__(self) -> "ProgressIterator[Batch]":
        return ProgressIterator(iter(self._loader), self._meter())

    def __aiter__(self) -> "ProgressIterator[Batch]":
        return ProgressIterator(aiter(self._loader), self._meter())

    def _meter(self) -> "Meter":
        total = self._total
        if total is None:
            # A stream has no length.
            with suppress(TypeError, AttributeError, NotImplementedError):
                total = len(self._loader)
        return Meter(self._loader, total, self._display(), self._desc)

    def _display(self) -> "_Bar | _Line | None":
        file = sys.stderr if self._file is None else self._file
        if not _is_seen(file):
            return None
        bar = _bar_class(self._file)
        if bar is None:
            return _Line(file, leave=self._leave)
        return _Bar(bar, desc=self._desc, file=self._file, leave=self._leave)


class ProgressIterator(Generic[Batch]):
    """The loader's iterator, with a display; both end together.

    Like the loader's own, dropping it releases everything, ``close`` and ``aclose``
    wait for that, and no frame of a traceback holds it.
    """

    def __init__(self, batches: Any, meter: "Meter") -> None:
        self._batches = batches
        self._meter = meter
        # At the interpreter's exit the display need not be closed.
        weakref.finalize(self, meter.close).atexit = False

    def __iter__(self) -> "ProgressIterator[Batch]":
        return self

    def __aiter__(self) -> "ProgressIterator[Batch]":
        return self

    def __next__(self) -> Batch:
        batches, meter = self._batches, self._meter
        del self
        try:
            if clock() >= meter.due:
                meter.look()
            batch: Batch = next(batches)
        except BaseException as error:
            del batches
            if isinstance(error, StopIteration):
                meter.finish()
            raise
        meter.batches += 1
        return batch  # nothing is called here: an interrupt would lose it

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
    """Figures of one iteration, and the time of their next update.

    Attributes:
        batches: Batches delivered in this iteration.
        due: When to update next.
        total: Batches of the epoch, if known.
        resumed: Position in the epoch where this iteration started.
        seconds: Seconds from its start to the latest update.
        rates: Rates and shares, as text.
    """

    def __init__(
        self,
        loader: Any,
        total: int | None,
        display: "_Bar | _Line | None",
        desc: str | None,
    ) -> None:
        self.batches = 0
        self.total = total
        self.resumed: int = 0
        self.seconds: float = 0.0
        self.rates: tuple[str, ...] = ()
        now = clock()
        self.due: float = now
        if display is None:
            self.due = _logged.setdefault(loader, now) + LOGGED_EVERY
        self._loader = loader
        self._display = display
        self._desc = desc
        self._began = now
        # For each update: time, batches, seconds of waiting.
        self._looks = deque([(now, 0, 0.0)], maxlen=_LOOKS if display else 1)
        self._next_measure = now
        self._epoch: int | None = None
        self._bytes = 0.0  # of a batch
        self._shown = 0  # batches
        self._is_closed = False

    def look(self) -> None:
        """Show the current figures."""
        now = clock()
        self.due = now + SHOWN_EVERY
        if self._display is None:
            _logged[self._loader] = now
            self.due = now + LOGGED_EVERY
        if not self.batches or self._is_closed:
            return
        if now >= self._next_measure:
            self._measure(now)
            self._next_measure = now + _IDLE * (clock() - now)
        self._show(now)

    def finish(self) -> None:
        """Show the figures of the whole iteration and close the display."""
        try:
            if self.batches and not self._is_closed and self._display is not None:
                now = clock()
                self._measure(now)
                self._show(now)
        finally:
            self.close()

    def close(self) -> None:
        """Close the display. Finalizers call it, so it does not use the loader."""
        if self._is_closed:
            return
        self._is_closed, self.due = True, inf
        if self._display is None:
            return
        try:
            if 0 < self._shown < self.batches:
                self._show(clock())
        finally:
            with suppress(OSError, ValueError):
                self._display.close()

    def __str__(self) -> str:
        """Return the figures as one line."""
        batches, total = self.resumed + self.batches, self.total
        where = f"{batches:,} batches"
        if total is not None:
            where = f"{batches:,} of {total:,} batches"
            if 0 < batches <= total:
                where += f" ({batches / total:.0%})"
        text = ", ".join([where, *self.rates])
        return text if self._desc is None else f"{self._desc}: {text}"

    def _show(self, now: float) -> None:
        self.seconds, self._shown = now - self._began, self.batches
        if self._display is None:
            _log.info("%s", str(self))  # a record may be formatted later
            return
        with suppress(OSError, ValueError):  # the terminal is gone
            self._display.show(self)

    def _measure(self, now: float) -> None:
        """Compute the rates over the latest updates."""
        stats = self._loader.stats()
        look = now, self.batches, stats.waited
        if stats.epoch != self._epoch:
            if self._epoch is not None:  # another iteration has started meanwhile
                self._looks.clear()
            else:
                self.resumed = stats.resumed_at
            self._epoch = stats.epoch
        if self._looks:
            seconds, batches, waited = map(operator.sub, look, self._looks[0])
            if seconds > 0:
                size = stats.samples / stats.recent if stats.recent else 0.0
                self._bytes = stats.batch_bytes
                words = self._words(batches / seconds, size, waited / seconds)
                self.rates = tuple(words)
        self._looks.append(look)

    def _words(self, rate: float, size: float, waits: float) -> Iterator[str]:
        yield (
            f"{_short(rate * size)} samples/s" if size else f"{_short(rate)} batches/s"
        )
        if self._bytes:
            yield f"{_short(rate * self._bytes)}B/s"
        yield f"waiting {min(1.0, max(0.0, waits)):.0%}"
        if self.resumed:
            yield f"resumed at {self.resumed:,}"


class _Bar:
    """A bar of tqdm's, on a terminal or in a notebook."""

    def __init__(self, bar_class: Callable[..., Any], **given: Any) -> None:
        self._make, self._given = bar_class, given
        self._bar: Any = None

    def show(self, meter: Meter) -> None:
        bar = self._bar
        if bar is None:  # made only when there is something to show
            bar = self._bar = self._make(
                total=meter.total,
                initial=meter.resumed,
                unit=" batches",
                mininterval=0,
                miniters=0,
                delay=1e-9,  # not yet
                dynamic_ncols=True,
                **self._given,
            )
            bar.start_t = bar.last_print_t = time.time() - meter.seconds
        bar.set_postfix_str(", ".join(meter.rates), refresh=False)
        bar.update(meter.resumed + meter.batches - bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class _Line:
    """One line of plain text, written over and over."""

    def __init__(self, file: TextIO, *, leave: bool) -> None:
        self._file = file
        self._leave = leave
        self._width = 0

    def show(self, meter: Meter) -> None:
        text = str(meter)[: shutil.get_terminal_size().columns - 1]
        self._write("\r" + text.ljust(self._width))
        self._width = len(text)

    def close(self) -> None:
        if self._width:
            gone = "\r" + " " * self._width + "\r"
            self._write("\n" if self._leave else gone)

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()


def _short(number: float) -> str:
    """Return three digits and a prefix, such as ``"12.3 k"``."""
    power = 0
    while abs(number) >= 999.5 and power < 4:
        number, power = number / 1000, power + 1
    return f"{number:.3g}{('', ' k', ' M', ' G', ' T')[power]}"


def _is_seen(file: TextIO) -> bool:
    """Tell whether ``file`` is a terminal or a notebook."""
    is_notebook = type(file).__module__.startswith("ipykernel.")
    with suppress(AttributeError, ValueError):  # no file; or a closed one
        return is_notebook or file.isatty()
    return False


def _bar_class(file: TextIO | None) -> Callable[..., Any] | None:
    """Return tqdm's class for this place, without its monitor thread, or None."""
    try:
        # A given file is no notebook's cell.
        module = importlib.import_module("tqdm.auto" if file is None else "tqdm")
    except ImportError:
        return None
    bar: Callable[..., Any] = type("Bar", (module.tqdm,), {"monitor_interval": 0})
    return bar
