"""Whether the loader limits training, which stage does, and the change that helps.

Each change of an argument is tried in a replay of the recorded batches, as is each
stage at twice its speed. The advice is the change that gains most there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import NamedTuple

from aioloader._observe.batches import Batch, batches_of, scaled, slow_workers
from aioloader._observe.changes import Change, changes, waits_for_store
from aioloader._observe.records import Copy, LoopLag, Record, Setting
from aioloader._observe.replay import Replayed, replay, window_of
from aioloader._observe.stages import making_lanes, on_one_clock
from aioloader._observe.stats import LoaderStats
from aioloader._observe.words import seconds_text

# Below this share of waiting, nothing limits training.
_WAITS = 0.02
# The least gain of an advice, in percent.
_LEAST_GAIN = 5.0
# A cheaper change is preferred if it achieves this share of the best speed.
_AS_GOOD = 0.95
# With fewer batches, the verdict is a guess.
_ENOUGH = 16
# The loop is the verdict only if it is blocked for this share of the time.
_LAGS = 0.1
# Above this utilization, processors are the limit.
_BUSY = 0.8
# The report warns if the replay of the recorded setting is off by more than this share.
_IS_OFF = 0.2

_STAGES = ("read", "transform", "collate", "transport", "device", "consumer")
_WORDS = {
    "read": "Reading samples",
    "transform": "The transform",
    "collate": "Collating",
    "transport": "The transport of batches to the consumer",
    "device": "The copy to the device",
}
_ON_HOST = "Page-locking batches, or device_transform,"


@dataclass(frozen=True)
class Advice:
    """The one change that gains most.

    Attributes:
        argument: What to change: an argument of ``DataLoader``, or a coroutine's name.
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
            ``"transport"``, ``"device"``, ``"consumer"``, ``"loop"``; ``"nothing"`` if
            the consumer hardly waits; ``"unknown"`` if too little is recorded.
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
    starting = min(len(records) // 4, window_of(setting, batches))
    settled = records[starting:]
    seconds = settled[-1].taken - settled[0].taken
    waited = sum(one.taken - one.asked for one in settled[1:])
    share = waited / seconds if seconds else 0.0
    slow = slow_workers(on_one_clock(records), setting)
    now = replay(batches, setting, slow)
    recent = records[-len(batches) - 1 :]
    each = (recent[-1].taken - recent[0].taken) / len(batches)
    locked = mean(one.locked for one in batches) / each if each else 0.0
    share = min(1.0, share + locked)
    found = _Found("nothing")
    if share >= _WAITS:
        found = _findings(batches, setting, slow)
        if stats is not None and stats.loop_lag is not None:
            found = _lagging(Replayed(each, now.step), stats.loop_lag, found) or found
    return Report(
        headline=_headline(found, setting, share, is_locked=locked >= _WAITS),
        stage=found.stage,
        advice=found.advice,
        limit="" if found.advice else _limit(found.stage, batches, setting, now),
        wait_share=share,
        head_room=head_room(batches, setting, slow),
        batches=len(batches),
        model_error=now.seconds / each - 1 if each else 0.0,
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


def best_change(
    batches: Sequence[Batch], setting: Setting, slow: Sequence[float] = ()
) -> tuple[Change, float] | None:
    """Return the change to make and its gain in percent; None if none is worth it.

    It is the cheapest change within 5 percent of the best speed; among equal ones the
    first, which changes least.
    """
    now = replay(batches, setting, slow)
    tried = [
        (one, _gain(now, replay(one.batches, one.setting, slow)))
        for one in changes(batches, setting, slow)
    ]
    most = max((gain for _, gain in tried), default=0.0)
    if most < _LEAST_GAIN:
        return None
    least = max(_LEAST_GAIN, _AS_GOOD * (100 + most) - 100)
    good = [(one, gain) for one, gain in tried if gain >= least]
    return min(good, key=lambda pair: pair[0].cost)


class _Found(NamedTuple):
    stage: str
    advice: Advice | None = None
    lag: LoopLag | None = None


def _lagging(now: Replayed, lag: LoopLag, else_found: _Found) -> _Found | None:
    """Return the finding that the loop is blocked; None if that is not the cause."""
    if not lag.culprit or lag.share < _LAGS:
        return None
    advice, other = _freed(lag, now), else_found.advice
    if lag.computes and other is not None and other.argument == "num_workers":
        advice = other  # a thread would share the interpreter lock with the loop
    return _Found("loop", advice, lag) if advice.gain >= _LEAST_GAIN else None


def _findings(
    batches: Sequence[Batch], setting: Setting, slow: Sequence[float]
) -> _Found:
    """Return the stage that limits training, and the advice."""
    halved = {
        name: replay(scaled(batches, name, 0.5), setting, slow).seconds
        for name in _STAGES
        if name != "device" or setting.on_device
    }
    stage = min(halved, key=lambda name: halved[name])
    best = best_change(batches, setting, slow)
    if best is None:
        return _Found(stage)
    one, gain = best
    return _Found(stage, Advice(one.argument, one.old, one.new, gain, one.why))


def _gain(now: Replayed, then: Replayed) -> float:
    """Return the gain in steps per second, in percent."""
    return 100 * (now.seconds / then.seconds - 1) if then.seconds else 0.0


def _freed(lag: LoopLag, now: Replayed) -> Advice:
    """Return the advice to free the loop, with an upper bound of the gain."""
    seconds = max(now.step, now.seconds * (1 - lag.share))
    gain = _gain(now, Replayed(seconds, now.step))
    why = (
        f"it blocks the loop {lag.share:.0%} of the time, up to "
        f"{seconds_text(lag.seconds)} at a time, and nothing else is read meanwhile"
    )
    if lag.is_callers:
        return Advice("loop", "'caller'", "'thread'", gain, f"{lag.culprit}: {why}")
    new = "a process pool" if lag.computes else "asyncio.to_thread"
    return Advice(lag.culprit, "the event loop", new, gain, why)


def _headline(
    found: "_Found", setting: Setting, share: float, *, is_locked: bool
) -> str:
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
    is_on_host = stage == "device" and setting.stays_on_host
    words = _ON_HOST if is_on_host else _WORDS[stage]
    return f"{words} holds training back: {waits}."


def _limit(
    stage: str, batches: Sequence[Batch], setting: Setting, now: Replayed
) -> str:
    """Return what sets the pace if no change of an argument helps."""
    if stage in {"nothing", "consumer"}:
        return "The step itself sets the pace."
    cpu = sum(one.cpu for one in batches) / len(batches)
    processors = min(max(1, setting.cores), making_lanes(setting))
    if cpu > _BUSY * now.seconds * processors and making_lanes(setting) >= (
        setting.cores
    ):
        return f"The cores set the pace: all {setting.cores} are busy making batches."
    if stage == "read" and waits_for_store(batches):
        return "The store sets the pace: no argument gains 5 % or more."
    if stage == "device" and not setting.stays_on_host:
        return "The link to the device sets the pace: make batches smaller in bytes."
    return "No argument gains 5 % or more: this stage must get cheaper."


def _remarks(stats: LoaderStats | None) -> tuple[str, ...]:
    if stats is None:
        return ()
    counts = {
        "samples failed": stats.failures,
        "worker processes died": stats.worker_deaths,
        "worker processes were started again": stats.worker_restarts,
    }
    return tuple(f"{count:,} {what}." for what, count in counts.items() if count)
