"""Counters of a server, in all and by name; any thread may read or wait for them."""

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace


@dataclass
class Counts:
    """Counters of a server.

    Attributes:
        requests: Requests read.
        bytes: Bytes of bodies sent.
        in_flight: Requests being answered now.
    """

    requests: int = 0
    bytes: int = 0
    in_flight: int = 0


class Tally:
    """Counts requests, bytes and faults."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._total = Counts()
        self._by_name: defaultdict[str, Counts] = defaultdict(Counts)
        self._injected: Counter[str] = Counter()

    def counts(self, name: str | None = None) -> Counts:
        """Return a copy of the counts for one name, or for all; "" counts listings."""
        with self._changed:
            return replace(self._total if name is None else self._by_name[name])

    def injected(self) -> Counter[str]:
        """Return how often each fault was injected, by the names of ``Faults``."""
        with self._changed:
            return self._injected.copy()

    def wait_for(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Block the thread until ``condition``, about the counts, holds.

        Raises:
            TimeoutError: If it did not within ``seconds``.
        """
        with self._changed:
            if not self._changed.wait_for(condition, seconds):
                raise TimeoutError(f"not within {seconds:g} seconds: {self._total}")

    @contextlib.contextmanager
    def _request(self, name: str) -> Iterator[int]:
        """Count a request, in flight within the block; yields its number, from 1."""
        with self._changed:
            both = self._total, self._by_name[name]
            for counts in both:
                counts.requests += 1
                counts.in_flight += 1
            number = self._total.requests
            self._changed.notify_all()
        try:
            yield number
        finally:
            with self._changed:
                for counts in both:
                    counts.in_flight -= 1
                self._changed.notify_all()

    def _add_bytes(self, name: str, amount: int) -> None:
        with self._changed:
            self._total.bytes += amount
            self._by_name[name].bytes += amount
            self._changed.notify_all()

    def _add_fault(self, kind: str) -> None:
        with self._changed:
            self._injected[kind] += 1
            self._changed.notify_all()
