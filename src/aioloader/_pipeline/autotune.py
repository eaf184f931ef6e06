"""Controllers that tune a loader's ``"auto"`` arguments; callers measure the speeds.

A controller observes the speed at one value and tries another. It doubles the value
while that helps (like TCP's slow start), then adds a quarter (additive increase), and
halves it if reads fail (multiplicative decrease). It undoes a change that does not
help, and logs each decision with its reason. Source: RFC 5681, sections 3.1 and 3.2.
"""

import logging
from collections import deque
from typing import Any, NamedTuple

from aioloader._base.records import bytes_of

_log = logging.getLogger("aioloader")

# Least speed-ups for which a new value is kept: if it was doubled, and otherwise.
_MIN_GAIN_DOUBLED = 0.1
_MIN_GAIN = 0.05
# A consumer that waits for a smaller share of the time counts as not waiting.
_MIN_WAITED = 0.02
# The value is halved if the share of failed reads exceeds the usual share by this.
_MIN_FAILURES = 0.01
# The first and the longest pause between two trials, in observations.
_FIRST_PAUSE = 8
_MAX_PAUSE = 256


class Observation(NamedTuple):
    """The measurements of a period in which a controller's value was constant."""

    rate: float  # samples, or batches, per second
    waited: float = 1.0  # share of the time that the consumer waited
    failures: float = 0.0  # share of the reads that failed, including those retried

    def gain(self, before: "Observation") -> float:
        return self.rate / before.rate - 1 if before.rate > 0 else float("inf")

    def words(self, before: "Observation") -> str:
        """Return the change since ``before`` in words, such as ``was 5% faster``."""
        gain = self.gain(before)
        return f"was {abs(gain):.0%} {'faster' if gain >= 0 else 'slower'}"


class _Trial(NamedTuple):
    """A trial of a controller's new value, which is kept if it is fast enough."""

    before: int  # the previous value
    seen: Observation  # of the previous value
    gain: float  # the speed-up for which the new value is kept
    is_for_failures: bool = False
    first: Observation | None = None  # of the new value, if it seemed too slow


class Controller:
    """A controller of one bounded number; its methods return decisions as log lines."""

    def __init__(self, name: str, start: int, least: int, most: int) -> None:
        self.name = name
        self.least: int = least
        self.most: int = max(least, most)
        self.value: int = min(max(int(start), least), self.most)
        self._trial: _Trial | None = None
        self._step = 0  # 0: the value is doubled
        self._has_gained = False
        self._pause = 0  # observations until the next trial
        self._next_pause = _FIRST_PAUSE
        self._usual_failures = 0.0

    @property
    def is_trying(self) -> bool:
        """Whether the current value is on trial, so that it may soon be raised."""
        return self._trial is not None

    def limit(self, most: int, reason: str) -> str | None:
        """Set the maximum; if the value is greater, lower the value to the maximum."""
        self.most = max(self.least, most)
        if self.value <= self.most:
            return None
        self._trial = None
        self._end_doubling(self.most)
        return self._set(self.most, reason)

    def observe(self, seen: Observation) -> str | None:
        """Choose the next value from an observation of the current value."""
        trial, self._trial = self._trial, None
        if trial is not None and trial.is_for_failures:
            return self._judge_failures(trial, seen)
        if seen.failures > self._usual_failures + _MIN_FAILURES:
            return self._halve_for_failures(seen)
        if trial is not None:
            return self._judge(trial, seen)
        if self._pause:
            self._pause -= 1
            return None
        return self._try_more(seen)

    def _judge(self, trial: _Trial, seen: Observation) -> str | None:
        """Keep or undo the value on trial; if it seems slow, observe it once more."""
        if trial.first is not None:
            seen = max(seen, trial.first, key=lambda observation: observation.rate)
        elif seen.waited >= _MIN_WAITED and seen.gain(trial.seen) < trial.gain:
            self._trial = trial._replace(first=seen)  # it may have been a stall
            return None
        if trial.before < self.value:
            return self._judge_more(trial, seen)
        return self._judge_less(trial, seen)

    def _try_more(self, seen: Observation, why: str = "") -> str | None:
        """Try a greater value if the consumer waits and the maximum is not reached."""
        if seen.waited < _MIN_WAITED or self.value == self.most:
            return None
        why = why or f"the consumer waits {seen.waited:.0%} of the time"
        gain = _MIN_GAIN if self._step else _MIN_GAIN_DOUBLED
        after = self.value + (self._step or self.value)
        self._trial = _Trial(self.value, seen, gain)
        return self._set(after, f"{why}; more is tried")

    def _judge_more(self, trial: _Trial, seen: Observation) -> str | None:
        """Keep a greater value if it is faster, or if the consumer no longer waits."""
        if seen.waited < _MIN_WAITED:
            return self._stay()
        gain = seen.gain(trial.seen)
        if gain >= trial.gain:
            self._has_gained, self._next_pause = True, _FIRST_PAUSE
            if self.value == self.most:
                return self._stay()
            return self._try_more(seen, f"that was {gain:.0%} faster")
        was_doubled, before = not self._step, trial.before
        self._end_doubling(before)
        words = f"more {seen.words(trial.seen)}"
        if was_doubled and self._has_gained:  # the best value is less than double
            return self._set(before, words)
        if was_doubled or gain < -_MIN_GAIN:
            after = before // 2 if was_doubled else before - self._step
            if max(after, self.least) < before:
                self._trial = _Trial(before, trial.seen, _MIN_GAIN)
                return self._set(after, f"{words}; less is tried")
        return self._stay(before, words)

    def _judge_less(self, trial: _Trial, seen: Observation) -> str | None:
        """Keep a smaller value if it is faster, and then try still less."""
        words = f"less {seen.words(trial.seen)}"
        if seen.gain(trial.seen) < trial.gain:
            return self._stay(trial.before, words)
        if self.value <= self.least:
            return self._stay()
        self._trial = _Trial(self.value, seen, _MIN_GAIN)
        after = max(self.value // 2, self.value - self._step)
        return self._set(after, f"{words}; still less is tried")

    def _halve_for_failures(self, seen: Observation) -> str | None:
        """Try half the value, because too great a value may cause failed reads."""
        self._end_doubling(self.value // 2)
        if self.value == self.least:
            self._usual_failures = seen.failures
            return None
        self._trial = _Trial(self.value, seen, 0, is_for_failures=True)
        return self._set(self.value // 2, f"{seen.failures:.1%} of the reads failed")

    def _judge_failures(self, trial: _Trial, seen: Observation) -> str | None:
        """Keep the halved value if at least a third fewer reads fail with it."""
        if seen.failures <= trial.seen.failures / 1.5:
            return self._stay()
        self._usual_failures = max(seen.failures, trial.seen.failures)
        why = f"with less of it, {seen.failures:.1%} of the reads fail too"
        return self._set(trial.before, why)

    def _end_doubling(self, value: int) -> None:
        self._step = max(1, value // 4)

    def _stay(self, value: int = 0, reason: str = "") -> str | None:
        """Set ``value``, or keep the value if 0; pause trials, longer each time."""
        value = value or self.value
        if self._step:
            self._end_doubling(value)
        self._pause = self._next_pause
        self._next_pause = min(2 * self._next_pause, _MAX_PAUSE)
        return self._set(value, reason)

    def _set(self, after: int, reason: str) -> str | None:
        after = min(max(after, self.least), self.most)
        before, self.value = self.value, after
        if after == before:
            return None
        decision = f"{self.name}: {before} -> {after}: {reason}"
        _log.info("%s", decision)
        return decision


_KEPT_SIZES = 32  # how many recent batch sizes are remembered
_MEASURED_FIRST = 8  # how many of the first batches are all measured
_MEASURED_EVERY = 4  # of the later batches, one in this many is measured


class BytesInFlight:
    """An estimate of how many batches fit into ``most`` bytes, by recent sizes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.greatest: int = 0  # bytes of the largest recent batch; 0: none yet
        self._seen = 0
        self._sizes: deque[int] = deque(maxlen=_KEPT_SIZES)

    def note(self, batch: Any) -> None:
        """Count a delivered batch; measure the first ones, then every fourth."""
        if self._seen < _MEASURED_FIRST or self._seen % _MEASURED_EVERY == 0:
            self._sizes.append(max(1, bytes_of(batch)))
            self.greatest = max(self._sizes)
        self._seen += 1

    def batches(self) -> int:
        """Return how many batches fit, at least 1; return 1 until a size is known."""
        return max(1, self.most // self.greatest) if self.greatest else 1
