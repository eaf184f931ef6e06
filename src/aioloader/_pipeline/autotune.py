"""Numbers that a loader chooses while it runs: a controller without a clock.

It observes what a value achieves and tries another one: twice as much while that helps
(like TCP's slow start), then a constant step more (additive increase), and half as much
if reads fail (multiplicative decrease). A change that does not help is undone. Each
decision is logged with its reason. Source: RFC 5681, sections 3.1 and 3.2.
"""

import logging
from collections import deque
from typing import Any, NamedTuple

from aioloader._base.records import bytes_of

_log = logging.getLogger("aioloader")

# Speed-up for which a value is kept: after doubling, and after a step or halving.
_GAIN_DOUBLED = 0.1
_GAIN = 0.05
# Below this share of the time, the consumer does not wait.
_WAITS = 0.02
# By how much the share of failed reads must exceed the usual share.
_FAILS = 0.01
# Observations between two trials: initially, and the maximum.
_REST = 8
_LONGEST_REST = 256


class Observation(NamedTuple):
    """What a value has achieved over a period."""

    rate: float  # samples, or batches, per second
    waited: float = 1.0  # share of the time that the consumer waited
    failures: float = 0.0  # share of the reads that failed, including those retried

    def gain(self, before: "Observation") -> float:
        return self.rate / before.rate - 1 if before.rate > 0 else float("inf")

    def words(self, before: "Observation") -> str:
        """Return the change as the end of a sentence."""
        gain = self.gain(before)
        return f"was {abs(gain):.0%} {'faster' if gain >= 0 else 'slower'}"


class _Trial(NamedTuple):
    """A value on trial: the one before, what that achieved, and the least speed-up."""

    before: int
    seen: Observation
    gain: float
    is_for_failures: bool = False
    first: Observation | None = None  # of two, if the first was too low


class Controller:
    """Choose one number within bounds; decisions are lines for a log."""

    def __init__(self, name: str, start: int, least: int, most: int) -> None:
        self.name = name
        self.least: int = least
        self.most: int = max(least, most)
        self.value: int = min(max(int(start), least), self.most)
        self._trial: _Trial | None = None
        self._step = 0  # while it is doubled
        self._has_gained = False
        self._rest = 0
        self._next_rest = _REST
        self._usual_failures = 0.0

    @property
    def is_trying(self) -> bool:
        """Whether the present value is on trial, and a greater one may follow."""
        return self._trial is not None

    def limit(self, most: int, reason: str) -> str | None:
        """Set the greatest value; decide at once if the present one exceeds it."""
        self.most = max(self.least, most)
        if self.value <= self.most:
            return None
        self._trial = None
        self._end_doubling(self.most)
        return self._go(self.most, reason)

    def observe(self, seen: Observation) -> str | None:
        """Decide what to do after observing the present value; None: nothing."""
        trial, self._trial = self._trial, None
        if trial is not None and trial.is_for_failures:
            return self._judge_failures(trial, seen)
        if seen.failures > self._usual_failures + _FAILS:
            return self._relieve_failures(seen)
        if trial is not None:
            return self._judge(trial, seen)
        if self._rest:
            self._rest -= 1
            return None
        return self._try_more(seen)

    def _judge(self, trial: _Trial, seen: Observation) -> str | None:
        """Keep a value or undo it; one that seems worse is observed twice."""
        if trial.first is not None:
            seen = max(seen, trial.first, key=lambda one: one.rate)
        elif seen.waited >= _WAITS and seen.gain(trial.seen) < trial.gain:
            self._trial = trial._replace(first=seen)  # it may have been a stall
            return None
        if trial.before < self.value:
            return self._judge_more(trial, seen)
        return self._judge_less(trial, seen)

    def _try_more(self, seen: Observation, why: str = "") -> str | None:
        """Try a greater value if the consumer waits and there is one."""
        if seen.waited < _WAITS or self.value == self.most:
            return None
        why = why or f"the consumer waits {seen.waited:.0%} of the time"
        gain = _GAIN if self._step else _GAIN_DOUBLED
        after = self.value + (self._step or self.value)
        self._trial = _Trial(self.value, seen, gain)
        return self._go(after, f"{why}; more is tried")

    def _judge_more(self, trial: _Trial, seen: Observation) -> str | None:
        """Keep a greater value if it is faster or the consumer no longer waits."""
        if seen.waited < _WAITS:
            return self._take_rest()
        gain = seen.gain(trial.seen)
        if gain >= trial.gain:
            self._has_gained, self._next_rest = True, _REST
            if self.value == self.most:
                return self._take_rest()
            return self._try_more(seen, f"that was {gain:.0%} faster")
        was_doubled, before = not self._step, trial.before
        self._end_doubling(before)
        words = f"more {seen.words(trial.seen)}"
        if was_doubled and self._has_gained:  # the best value is below twice as much
            return self._go(before, words)
        if was_doubled or gain < -_GAIN:
            after = before // 2 if was_doubled else before - self._step
            if max(after, self.least) < before:
                self._trial = _Trial(before, trial.seen, _GAIN)
                return self._go(after, f"{words}; less is tried")
        return self._take_rest(before, words)

    def _judge_less(self, trial: _Trial, seen: Observation) -> str | None:
        """Keep a smaller value if it achieves enough."""
        words = f"less {seen.words(trial.seen)}"
        if seen.gain(trial.seen) < trial.gain:
            return self._take_rest(trial.before, words)
        if self.value <= self.least:
            return self._take_rest()
        self._trial = _Trial(self.value, seen, _GAIN)
        after = max(self.value // 2, self.value - self._step)
        return self._go(after, f"{words}; still less is tried")

    def _relieve_failures(self, seen: Observation) -> str | None:
        """Halve the value, which may be why reads fail."""
        self._end_doubling(self.value // 2)
        if self.value == self.least:
            self._usual_failures = seen.failures
            return None
        self._trial = _Trial(self.value, seen, 0, is_for_failures=True)
        return self._go(self.value // 2, f"{seen.failures:.1%} of the reads failed")

    def _judge_failures(self, trial: _Trial, seen: Observation) -> str | None:
        """Keep the smaller value if fewer reads fail with it."""
        if seen.failures <= trial.seen.failures / 1.5:
            return self._take_rest()
        self._usual_failures = max(seen.failures, trial.seen.failures)
        why = f"with less of it, {seen.failures:.1%} of the reads fail too"
        return self._go(trial.before, why)

    def _end_doubling(self, value: int) -> None:
        self._step = max(1, value // 4)

    def _take_rest(self, value: int = 0, reason: str = "") -> str | None:
        """Go to a value and try nothing for a while, then a step of a quarter."""
        value = value or self.value
        if self._step:
            self._end_doubling(value)
        self._rest = self._next_rest
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
        return self._go(value, reason)

    def _go(self, after: int, reason: str) -> str | None:
        after = min(max(after, self.least), self.most)
        before, self.value = self.value, after
        if after == before:
            return None
        decision = f"{self.name}: {before} -> {after}: {reason}"
        _log.info("%s", decision)
        return decision


_LATEST = 32  # batches whose sizes are remembered
_EACH = 8  # the first batches, all of which are measured
_EVERY = 4  # later, every fourth is measured


class BytesInFlight:
    """How many batches fit into a number of bytes, by the sizes of recent ones."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.greatest: int = 0  # bytes of the largest recent batch; 0: none yet
        self._seen = 0
        self._sizes: deque[int] = deque(maxlen=_LATEST)

    def note(self, batch: Any) -> None:
        """Note a delivered batch; only some are measured."""
        if self._seen < _EACH or self._seen % _EVERY == 0:
            self._sizes.append(max(1, bytes_of(batch)))
            self.greatest = max(self._sizes)
        self._seen += 1

    def batches(self) -> int:
        """Return how many batches may be held; 1 until a size is known."""
        return max(1, self.most // self.greatest) if self.greatest else 1
