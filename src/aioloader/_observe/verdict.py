"""Whether the loader limits training, which stage does, and the change that helps.

Each change of an argument is tried in a replay of the recorded batches, as is each
stage at twice its speed. The advice is the change that gains most there, but no change
gains more than was waited, or than idle processors and lanes allow, and none is advised
if the replay of the recorded setting differs from what was measured, or by more than
the gain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean
from typing import NamedTuple

from aioloader._observe.batches import (
    Batch,
    batches_of,
    crowding,
    scaled,
    slow_workers,
    start_seconds,
)
from aioloader._observe.bounds import Bounds, bounds_of
from aioloader._observe.changes import Change, changes, waits_for_store
from aioloader._observe.records import Copy, LoopLag, Record, Setting
from aioloader._observe.replay import Replayed, pace, replay, replay_again, window_of
from aioloader._observe.stages import on_one_clock
from aioloader._observe.stats import LoaderStats
from aioloader._observe.words import seconds_text

# Below this share of waiting, nothing limits training.
_WAITS = 0.02
# The least gain of an advice, in percent; more if the replay's error is larger.
_LEAST_GAIN = 5.0
# A cheaper change is preferred if it achieves this share of the best speed.
_AS_GOOD = 0.95
# An argument is preferred to new code if it achieves this share of its speed.
_AS_FAST = 0.75
# With fewer batches, the verdict is a guess.
_ENOUGH = 16
# The loop is the verdict only if it is blocked for this share of the time.
_LAGS = 0.1
# Processors are the limit if they allow no greater speed-up.
_BUSY = 1.25
# Nothing is advised if the replay of the recorded setting is off by more than this.
_IS_OFF = 0.15

# Nothing is advised about these: no step of a transport is seen, only the rest.
_UNSEEN = {"transport", "nothing"}
_STAGES = ("read", "transform", "collate", "transport", "device", "consumer")
_WORDS = {
    "read": "Reading samples",
    "transform": "The transform",
    "collate": "Collating",
    "transport": "The transport of batches to the consumer",
    "device": "The copy to the device",
}
_ON_HOST = "Page-locking batches, or Device.transform,"


@dataclass(frozen=True)
class Advice:
    """The one change that gains most.

    Attributes:
        argument: What to change: an argument of ``DataLoader`` or ``Device``, or a
            coroutine's name.
        old: Its value.
        new: Its new value.
        gain: Expected gain in steps per second, percent.
        why: One sentence.
    """

    argument: str
    old: object
    new: object
    gain: float
    why: str

    def __str__(self) -> str:
        return (
            f"Change {self.argument} from {self.old} to {self.new}: {self.gain:+.0f} % "
            f"steps per second expected; {self.why}."
        )


class HeadRoom(NamedTuple):
    """The utilization of the accelerator if steps get faster.

    Attributes:
        speed: Speed of a step, as a multiple of the present speed.
        utilisation: Share of the time that it computes then, from 0 to 1.
    """

    speed: int
    utilisation: float


@dataclass(frozen=True)
class Report:
    """The report of ``loader.report()``.

    Attributes:
        headline: What limits training, in one sentence.
        stage: The limiting stage: ``"read"``, ``"transform"``, ``"collate"``,
            ``"transport"``, ``"device"``, ``"consumer"``, ``"loop"``; ``"start"`` if
            each epoch waits for its workers; ``"nothing"`` if the consumer hardly
            waits; ``"unknown"`` if too little is recorded.
        advice: What to change, or None if nothing gains 5 percent.
        limit: Without advice: what sets the pace.
        wait_share: Share of the time that the consumer waits, from 0 to 1, including
            waits for the GIL if threads of the loader hold it.
        head_room: For steps as fast as now, twice and four times as fast.
        batches: How many batches this is computed from.
        model_error: Error of the replay of the recorded setting, as a share of the
            seconds per batch.
        remarks: Other facts: failures and dead workers.
    """

    headline: str
    stage: str
    advice: Advice | None = None
    limit: str = ""
    wait_share: float = 0.0
    head_room: tuple[HeadRoom, ...] = ()
    batches: int = 0
    model_error: float = 0.0
    remarks: tuple[str, ...] = ()

    @property
    def confidence(self) -> str:
        """How reliable it is, as text."""
        if self.batches < _ENOUGH:
            return f"a guess, from {self.batches} batches only"
        words = f"from {self.batches} batches"
        if abs(self.model_error) > _IS_OFF:
            off = f"{self.model_error:+.0%} seconds per batch"
            return f"{words}; doubtful: their replay is off by {off}"
        return words

    def __str__(self) -> str:
        lines = [self.headline]
        if self.advice is not None:
            lines.append(str(self.advice))
        elif self.limit:
            lines.append(self.limit)
        if self.head_room:
            parts = ", ".join(
                f"{used:.0%} at {speed}x" for speed, used in self.head_room
            )
            lines.append(f"Accelerator utilisation by speed of a step: {parts}.")
        lines += self.remarks
        lines.append(f"Confidence: {self.confidence}.")
        return "\n".join(lines)


def report(
    records: Sequence[Record],
    setting: Setting,
    stats: LoaderStats | None = None,
    copies: Sequence[Copy] = (),
) -> Report:
    """Return the verdict on a loader.

    Args:
        records: The latest batches, in the order of delivery.
        setting: The loader's setting.
        stats: Other figures: failures and deaths become remarks, and a blocked loop
            outranks the stages that it slows down.
        copies: The latest copies to the device.
    """
    remarks = _remarks(stats)
    batches = batches_of(records, setting, copies)
    if not batches:
        headline = f"Too little is recorded to tell: {len(records)} batches."
        return Report(headline, "unknown", batches=len(records), remarks=remarks)
    # The first batches are late: they wait for workers and for the window to fill.
    first = min(len(records) // 4, window_of(setting, batches))
    settled = records[max(first, len(records) - len(batches) - 1) :]
    each = (settled[-1].taken - settled[0].taken) / (len(settled) - 1)
    waited = mean(one.taken - one.asked for one in settled[1:])
    locked = mean(one.locked for one in batches)
    share = min(1.0, (waited + locked) / each) if each else 0.0
    lag = None if stats is None else stats.loop_lag
    slow = slow_workers(on_one_clock(records), setting)
    bounds = bounds_of(settled, setting, batches, share, slow=slow, lag=lag)
    start, crowded = start_seconds(records, setting), crowding(records, setting)
    case = _Case(batches, setting, slow, bounds, start, crowded)
    seconds = case.now.seconds
    if records[0].number == 0 and len(records) == len(batches) + 1:  # all of an epoch
        seconds = replay_again(batches, setting, slow, first)
    measured = pace([one.taken for one in settled])
    error = seconds / measured - 1 if measured else 0.0
    is_locked = share > 0 and locked >= _WAITS * each
    found = case.found(share, error)
    if lag is not None and share >= _WAITS:
        found = _lagging(Replayed(each, case.now.step), lag, found) or found
    return Report(
        headline=_headline(found, case, share, is_locked=is_locked),
        stage=found.stage,
        advice=found.advice,
        limit="" if found.advice else _limit(found.stage, case, error),
        wait_share=share,
        head_room=head_room(batches, setting, slow),
        batches=len(batches),
        model_error=error,
        remarks=remarks,
    )


def head_room(
    batches: Sequence[Batch], setting: Setting, slow: Sequence[float] = ()
) -> tuple[HeadRoom, ...]:
    """Return how busy the accelerator is with steps at 1, 2 and 4 times the speed."""
    rooms = []
    for speed in (1, 2, 4):
        faster = replay(scaled(batches, "consumer", 1 / speed), setting, slow)
        rooms.append(HeadRoom(speed, 1 - faster.wait_share))
    return tuple(rooms)


class _Found(NamedTuple):
    stage: str
    advice: Advice | None = None
    lag: LoopLag | None = None


@dataclass(frozen=True)
class _Case:
    """A loader as it was recorded, and what bounds the gain of a change.

    Attributes:
        batches: The durations of its batches.
        setting: Its setting.
        slow: How many times longer each worker takes.
        bounds: What no change exceeds.
        start: Seconds of each epoch in which workers start.
        crowding: How many times longer computing takes because of other processes.
    """

    batches: Sequence[Batch]
    setting: Setting
    slow: Sequence[float] = ()
    bounds: Bounds = field(default_factory=Bounds)
    start: float = 0.0
    crowding: float = 1.0

    @cached_property
    def now(self) -> Replayed:
        """The replay of the recorded setting."""
        return replay(self.batches, self.setting, self.slow)

    @property
    def start_share(self) -> float:
        """The seconds in which workers start, per batch."""
        return self._per_batch(self.start)

    def _per_batch(self, seconds: float) -> float:
        """Return seconds of each epoch, per batch; 0 if its length is not known."""
        return seconds / self.setting.length if self.setting.length else 0.0

    def found(self, share: float, error: float) -> _Found:
        """Return the stage that limits training, and the advice.

        Args:
            share: Share of the time that the consumer waits.
            error: Error of the replay.
        """
        best = None if abs(error) > _IS_OFF else self.best(error)
        if best is not None and best[0].argument == "persistent_workers":
            stage = "start"
        else:
            stage = self.limiting_stage() if share >= _WAITS else "nothing"
        if best is None or stage in _UNSEEN:
            return _Found(stage)
        one, gain = best
        return _Found(stage, Advice(one.argument, one.old, one.new, gain, one.why))

    def limiting_stage(self) -> str:
        """Return the stage whose speed matters most."""
        halved = {
            name: replay(scaled(self.batches, name, 0.5), self.setting, self.slow)
            for name in _STAGES
            if name != "device" or self.setting.on_device
        }
        return min(halved, key=lambda name: halved[name].seconds)

    def best(self, error: float = 0.0) -> tuple[Change, float] | None:
        """Return the change to make and its gain in percent; None if none is worth it.

        A gain counts only as far as it exceeds the replay's ``error``.

        It is the cheapest change within 5 percent of the best speed, or within a
        quarter if that needs new code; among equal ones the first, which changes least.
        """
        enough = _enough(error)
        found = changes(self.batches, self.setting, self.slow, self.start)
        tried = [(one, self.gain(one)) for one in found]
        arguments = [pair for pair in tried if not pair[0].needs_code]
        for some, as_good in (arguments, _AS_FAST), (tried, 1.0):
            best = max((gain for _, gain in tried), default=0.0)
            most = max((gain for _, gain in some), default=0.0)
            if most < enough or 100 + most < as_good * (100 + best):
                continue
            least = max(enough, _AS_GOOD * (100 + most) - 100)
            good = [(one, gain) for one, gain in some if gain >= least]
            return min(good, key=lambda pair: pair[0].cost)
        return None

    def gain(self, change: Change) -> float:
        """Return the gain of a change in steps per second of whole epochs, percent."""
        seconds = self.now.seconds
        then = replay(change.batches, change.setting, self.slow).seconds
        then = max(then, seconds / self.bounds.of(change, self.setting))
        slowed = max(1.0, self.crowding) if change.start > 0 else 1.0
        then += self._per_batch(self.start + change.start * slowed)
        return 100 * ((seconds + self.start_share) / then - 1) if then else 0.0


def _lagging(now: Replayed, lag: LoopLag, else_found: _Found) -> _Found | None:
    """Return the finding that the loop is blocked; None if that is not the cause."""
    if not lag.culprit or lag.share < _LAGS:
        return None
    advice, other = _freed(lag, now), else_found.advice
    if lag.computes and other is not None and other.argument == "num_workers":
        advice = other  # a thread would share the interpreter lock with the loop
    return _Found("loop", advice, lag) if advice.gain >= _LEAST_GAIN else None


def _freed(lag: LoopLag, now: Replayed) -> Advice:
    """Return the advice to free the loop, with an upper bound of the gain."""
    seconds = max(now.step, now.seconds * (1 - lag.share))
    gain = 100 * (now.seconds / seconds - 1) if seconds else 0.0
    why = (
        f"it blocks the loop {lag.share:.0%} of the time, up to "
        f"{seconds_text(lag.seconds)} at a time, and nothing else is read meanwhile"
    )
    if lag.is_callers:
        return Advice("loop", "'caller'", "'thread'", gain, f"{lag.culprit}: {why}")
    new = "a process pool" if lag.computes else "asyncio.to_thread"
    return Advice(lag.culprit, "the event loop", new, gain, why)


def _headline(found: _Found, case: _Case, share: float, *, is_locked: bool) -> str:
    stage, lag = found.stage, found.lag
    what = "batches and for the interpreter's lock" if is_locked else "batches"
    waits = f"training waits for {what} {share:.0%} of the time"
    if stage == "nothing":
        return f"Nothing holds training back: {waits}."
    if stage == "consumer":
        return (
            "Training takes the time itself, more than any stage of the loader: "
            f"{waits}."
        )
    if lag is not None:
        return f"{lag.culprit} blocks the event loop and holds training back: {waits}."
    if stage == "start":
        took = seconds_text(case.start)
        return f"Starting workers holds training back: it takes {took} of each epoch."
    is_on_host = stage == "device" and case.setting.stays_on_host
    words = _ON_HOST if is_on_host else _WORDS[stage]
    return f"{words} holds training back: {waits}."


def _enough(error: float) -> float:
    """Return the least gain that is advised, in percent: some, beyond the error."""
    return _LEAST_GAIN + 100 * abs(error)


def _limit(stage: str, case: _Case, error: float) -> str:
    """Return what sets the pace if no change of an argument helps."""
    setting = case.setting
    is_handed = stage == "transport" and setting.place in {"thread", "workers"}
    is_link = stage == "device" and not setting.stays_on_host
    is_store = stage == "read" and waits_for_store(case.batches, setting)
    busy = (
        f"The cores set the pace: all {setting.cores} are busy, with batches, the step "
        "or other processes."
    )
    doubtful = (
        "Nothing is advised: a replay of these batches differs from what was measured "
        f"by {error:+.0%} seconds per batch."
    )
    link = "The link to the device sets the pace: make batches smaller in bytes."
    least = f"{_enough(error):.0f} % or more"
    texts = (
        (stage in {"nothing", "consumer"}, "The step itself sets the pace."),
        (case.bounds.cores < _BUSY, busy),
        (is_handed, "Handing batches over sets the pace: larger ones cost less of it."),
        (abs(error) > _IS_OFF, doubtful),
        (is_store, f"The store sets the pace: no argument gains {least}."),
        (is_link, link),
    )
    last = f"No argument gains {least}: this stage must get cheaper."
    return next((text for is_so, text in texts if is_so), last)


def _remarks(stats: LoaderStats | None) -> tuple[str, ...]:
    if stats is None:
        return ()
    counts = {
        "samples failed": stats.failures,
        "worker processes died": stats.worker_deaths,
        "worker processes were started again": stats.worker_restarts,
    }
    return tuple(f"{count:,} {what}." for what, count in counts.items() if count)
