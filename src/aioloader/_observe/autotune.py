"""Numbers that a loader chooses while it runs: a controller without a clock.

It observes what a value achieves and tries another one: twice as much while that gains
(like TCP's slow start), then a constant step more (additive increase), and half as much
if reads fail or their latency rises (multiplicative decrease). A change without a gain
is undone. Each decision is logged with its reason. Source: RFC 5681, sections 3.1 and
3.2.
"""

import logging
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from aioloader._observe.records import bytes_of

_log = logging.getLogger("aioloader")

# Gain for which a value is kept: after doubling, and after a step or halving.
_GAIN_DOUBLED = 0.1
_GAIN = 0.05
# Below this share of the time, the consumer does not wait.
_WAITS = 0.02
# By how much the share of failed reads must exceed the usual share.
_FAILS = 0.01
# Factor by which the latency must exceed its usual value to count as risen.
_RISEN = 2.0
# Observations between two trials: initially, and the maximum.
_REST = 8
_LONGEST_REST = 256


@dataclass(frozen=True)
class Observation:
    """What a value has achieved over a period.

    Attributes:
        rate: Samples, or batches, per second.
        waited: Share of the time that the consumer waited.
        latency: Mean seconds per read; 0: not known.
        failures: Share of the reads that failed, including those retried.
    """

    rate: float
    waited: float = 1.0
    latency: float = 0.0
    failures: float = 0.0


@dataclass(frozen=True)
class _Trial:
    """The trial of a value: what it is compared with, and what it must gain."""

    before: int
    seen: Observation
    gain: float
    is_for_failures: bool = False
    first: Observation | None = None  # of two, if the first was too low


class Controller:
    """Choose one number within bounds; decisions are lines for a log.

    Attributes:
        value: The present value, always within the bounds.
    """

    def __init__(self, name: str, start: int, least: int, most: int) -> None:
        self.name = name
        self.least: int = least
        self.most: int = max(least, most)
        self.value: int = min(max(int(start), least), self.most)
        self._trial: _Trial | None = None
        self._known: Observation | None = None  # at the present value, while it rests
        self._is_doubling = True
        self._has_gained = False
        self._step = 1
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
        self._trial = self._known = None
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
            return self._watch(seen)
        return self._try_more(seen)

    def _judge(self, trial: _Trial, seen: Observation) -> str | None:
        """Keep a value or undo it; one that seems worse is observed twice."""
        if trial.first is None and _is_worse(trial, seen):
            self._trial = replace(trial, first=seen)  # it may have been a stall
            return None
        if trial.first is not None and trial.first.rate > seen.rate:
            seen = trial.first
        if trial.before < self.value:
            return self._judge_more(trial, seen)
        return self._judge_less(trial, seen)

    # -- more ------------------------------------------------------------------

    def _try_more(self, seen: Observation, why: str = "") -> str | None:
        """Try a greater value if the consumer waits and there is one."""
        if seen.waited < _WAITS or self.value == self.most:
            return None
        after = self.value * 2 if self._is_doubling else self.value + self._step
        gain = _GAIN_DOUBLED if self._is_doubling else _GAIN
        why = why or f"the consumer waits {seen.waited:.0%} of the time"
        return self._try(after, seen, gain, f"{why}; more is tried")

    def _judge_more(self, trial: _Trial, seen: Observation) -> str | None:
        """Keep a greater value if it has gained or the consumer no longer waits."""
        if seen.waited < _WAITS:
            self._take_rest()
            return None
        gain = _gain(trial.seen, seen)
        if gain >= trial.gain:
            self._has_gained, self._next_rest = True, _REST
            if self.value == self.most:
                self._take_rest()
            return self._try_more(seen, f"that gained {gain:.0%}")
        was_doubled, before = self._is_doubling, trial.before
        self._end_doubling(before)
        words = f"more {_words(trial.seen, seen)}"
        if was_doubled and self._has_gained:  # the best value is below twice as much
            return self._go(before, words)
        if was_doubled or gain < -_GAIN:
            after = before // 2 if was_doubled else before - self._step
            if max(after, self.least) < before:
                self._trial = _Trial(before, trial.seen, _GAIN)
                return self._go(after, f"{words}; less is tried")
        self._take_rest(before)
        return self._go(before, words)

    # -- less ------------------------------------------------------------------

    def _judge_less(self, trial: _Trial, seen: Observation) -> str | None:
        """Keep a smaller value if it achieves enough."""
        gain = _gain(trial.seen, seen)
        if gain < trial.gain:
            self._take_rest(trial.before)
            return self._go(trial.before, f"less {_words(trial.seen, seen)}")
        if trial.gain > 0 and self.value > self.least:
            why = f"less {_words(trial.seen, seen)}; still less is tried"
            after = max(self.value // 2, self.value - self._step)
            return self._try(after, seen, _GAIN, why)
        self._take_rest()
        return None

    def _watch(self, seen: Observation) -> str | None:
        """Halve the value if the latency has risen without a higher rate."""
        known = self._known
        if known is None:
            self._known = seen
            return None
        has_risen = known.latency and seen.latency > _RISEN * known.latency
        if not has_risen or _gain(known, seen) > -_GAIN or self.value == self.least:
            return None
        self._end_doubling(self.value // 2)
        why = f"the latency {_change(known.latency, seen.latency)}, at no higher rate"
        return self._try(self.value // 2, seen, -_GAIN, why)

    # -- failures ------------------------------------------------------------------

    def _relieve_failures(self, seen: Observation) -> str | None:
        """Halve the value, which may be why reads fail."""
        self._end_doubling(self.value // 2)
        if self.value == self.least:
            self._usual_failures = seen.failures
            return None
        why = f"{seen.failures:.1%} of the reads failed"
        self._trial = _Trial(self.value, seen, 0, is_for_failures=True)
        return self._go(max(self.least, self.value // 2), why)

    def _judge_failures(self, trial: _Trial, seen: Observation) -> str | None:
        """Keep the smaller value if fewer reads fail with it."""
        if seen.failures <= trial.seen.failures / 1.5:
            self._take_rest()
            return None
        self._usual_failures = max(seen.failures, trial.seen.failures)
        why = f"with less of it, {seen.failures:.1%} of the reads fail too"
        return self._go(trial.before, why)

    # -- all ------------------------------------------------------------------

    def _try(
        self, after: int, seen: Observation, gain: float, reason: str
    ) -> str | None:
        self._trial = _Trial(self.value, seen, gain)
        return self._go(after, reason)

    def _end_doubling(self, value: int) -> None:
        self._is_doubling, self._step = False, max(1, value // 4)

    def _take_rest(self, value: int = 0) -> None:
        """Try nothing for a while, then a step of a quarter."""
        if not self._is_doubling:
            self._end_doubling(value or self.value)
        self._rest, self._known = self._next_rest, None
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST)

    def _go(self, after: int, reason: str) -> str | None:
        after = min(max(after, self.least), self.most)
        before, self.value = self.value, after
        if after == before:
            return None
        decision = f"{self.name}: {before} -> {after}: {reason}"
        _log.info("%s", decision)
        return decision


def _gain(before: Observation, after: Observation) -> float:
    return after.rate / before.rate - 1 if before.rate > 0 else float("inf")


def _is_worse(trial: _Trial, seen: Observation) -> bool:
    """Tell whether a value has gained too little and the consumer still waits."""
    return seen.waited >= _WAITS and _gain(trial.seen, seen) < trial.gain


def _change(before: float, after: float) -> str:
    return f"rose from {before * 1e3:.3g} to {after * 1e3:.3g} ms"


def _words(before: Observation, after: Observation) -> str:
    """Return the change as the end of a sentence."""
    gain = _gain(before, after)
    words = f"gained {gain:.0%}" if gain >= 0 else f"lost {-gain:.0%}"
    if before.latency and after.latency > 1.1 * before.latency:
        words += f", and the latency {_change(before.latency, after.latency)}"
    return words


# -- bytes ----------------------------------------------------------------------

_LATEST = 32  # batches whose sizes are remembered
_EACH = 8  # the first batches, all of which are measured
_EVERY = 4  # later, every fourth is measured


class Held:
    """How many batches fit into a number of bytes, by the sizes of recent ones.

    Attributes:
        greatest: Bytes of the largest recent batch; 0: none was measured yet.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.greatest: int = 0
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
