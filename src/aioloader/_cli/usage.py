"""Common parts of commands: wrong arguments, and progress on a terminal."""

import sys
import time
from typing import Self

_SECONDS = 0.2


class UsageError(Exception):
    """The command line's arguments are wrong."""


class UserCodeError(Exception):
    """The user's code raised an error, which is the cause."""


class Progress:
    """Counts samples on stderr, if that is a terminal.

    Args:
        done: Samples already written.
        total: Samples in all, or None.
        is_quiet: Whether to show nothing.
    """

    def __init__(self, done: int, total: int | None, *, is_quiet: bool) -> None:
        self._done, self._total = done, total
        self._first, self._began = done, time.monotonic()
        self._shown = 0.0
        self._is_shown = sys.stderr.isatty() and not is_quiet

    def add(self) -> None:
        """Count one sample."""
        self._done += 1
        now = time.monotonic()
        if self._is_shown and now - self._shown >= _SECONDS:
            self._shown = now
            self._show(now)

    def _show(self, now: float) -> None:
        rate = (self._done - self._first) / max(now - self._began, 1e-9)
        of = "" if self._total is None else f" of {self._total:,}"
        sys.stderr.write(f"\r{self._done:,}{of} samples, {rate:,.0f}/s\x1b[K")
        sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
