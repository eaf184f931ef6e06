"""Decide whether the loader limits training, at which stage, and which change helps.

The times of the recorded batches are computed again (``pace``) for each change of an
argument, and for each stage at twice its speed. Measured waits and the idle time of
processors, GIL and event loop limit speed-ups. The advice is the cheapest change close
to the largest speed-up. The model's error is that of the seconds computed for the
recorded settings. If it is large, no change that needs the model is advised.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from aioloader._base.formatting import seconds_text, times_text
from aioloader._base.records import BatchRecord, Copy, LoopLag, RecordedSettings
from aioloader._observe.changes import Change, changes, waits_for_store
from aioloader._observe.costs import Costs, costs_of, start_seconds
from aioloader._observe.pace import pace, seconds_per_batch, taken_times, window_of
from aioloader._observe.stats import LoaderStats

# Below this share of waiting, the loader does not limit training.
_LEAST_WAIT = 0.02
# The least speed-up to advise, in percent; the error of the pace is added.
_LEAST_GAIN = 5.0
# A cheaper change is preferred if it achieves this share of the best speed.
_AS_GOOD = 0.95
# Changed arguments are preferred to new code if they achieve this share of its speed.
_AS_FAST = 0.75
# With fewer batches, the verdict is a guess, and nothing is advised.
_LEAST_BATCHES = 16
# A blocked loop is the bottleneck only if blocked for this share of the time.
_LEAST_LAG = 0.1
# Processors are the limit if they allow less than this speed-up, as a factor.
_CORES_BUSY = 1.25
# If a loop computes for this share of the time, it slows the reads, not the store.
_LOOP_BUSY = 0.5
# Nothing is advised if the pace of the recorded setting is off by more than this.
_MAX_ERROR = 0.15

# Stages without advice. Transport is not measured; it is the time that remains.
_UNSEEN = {"transport", "nothing"}
_STAGES = ("read", "transform", "collate", "transport", "device", "sampler", "consumer")
_WORDS = {
    "nothing": "Your training step is the bottleneck",
    "read": "Your dataset's reads are the bottleneck",
    "transform": "Your transform is the bottleneck",
    "collate": "Collating batches is the bottleneck",
    "transport": "Handing batches to your training loop is the bottleneck",
    "device": "The copy to the device is the bottleneck",
    "sampler": "The sampler is the bottleneck",
    "consumer": "Your training step is the bottleneck, more than any stage of the "
    "loader",
}
_ON_HOST = "Page-locking batches, or Device.transform, is the bottleneck"


@dataclass(frozen=True)
class Advice:
    """The one change that the report recommends.

    Attributes:
        argument: What to change: an argument of ``DataLoader`` or ``Device``, a
            coroutine that blocks the loop, or the size of batches.
        old: The present value of ``argument``.
        new: The value to set.
        gain: Expected speed-up in steps per second, in percent.
        why: The reason, as a clause.
    """

    argument: str
    old: object
    new: object
    gain: float
    why: str

    def __str__(self) -> str:
        return (
            f"Change {self.argument} from {self.old} to {self.new}, for about "
            f"{times_text(self.gain)} the steps per second: {self.why}."
        )


class HeadRoom(NamedTuple):
    """The accelerator's utilisation if training steps were faster.

    Attributes:
        speed: Speed of a step, as a multiple of the present speed.
        utilisation: Share of the time that the accelerator would compute, from 0 to 1.
    """

    speed: int
    utilisation: float


@dataclass(frozen=True)
class Report:
    """A verdict on a loader's speed, as ``loader.report()`` returns it.

    Attributes:
        headline: What limits training, in one sentence.
        stage: The limiting stage: ``"read"``, ``"transform"``, ``"collate"``,
            ``"transport"``, ``"device"``, ``"sampler"``, ``"consumer"``, ``"loop"``;
            ``"start"`` if each epoch waits for its workers; ``"nothing"`` if the
            consumer hardly waits; ``"unknown"`` if fewer than two batches have times.
        advice: What to change; None if no change is reliably 5 percent faster.
        limit: Why there is no advice, and what sets the pace; empty with advice.
        wait_share: Share of the time that the consumer waits, from 0 to 1, including
            waits for the GIL if threads of the loader hold it.
        head_room: The accelerator's utilisation with steps at 1, 2 and 4 times their
            speed; empty if unknown, or if ``model_error`` is beyond 15 percent.
        batches: How many batches the report is computed from.
        model_error: Error of the seconds per batch computed for the recorded settings,
            as a share of the measured seconds.
        remarks: Other facts: failures, dead and restarted workers, the slowest rank.
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
        """How reliable the report is, as text."""
        if self.batches < _LEAST_BATCHES:
            return f"a guess, measured over only {self.batches} batches"
        words = f"measured over the latest {self.batches} batches"
        if abs(self.model_error) > _MAX_ERROR:
            off = f"{self.model_error:+.0%}"
            return f"{words}; doubtful: the computed seconds per batch are off by {off}"
        return words

    def __str__(self) -> str:
        lines = [self.headline]
        if self.advice is not None:
            lines.append(str(self.advice))
        elif self.limit:
            lines.append(self.limit)
        if self.head_room:
            parts = ", ".join(
                f"{used:.0%} {'now' if speed == 1 else f'with steps {speed}x as fast'}"
                for speed, used in self.head_room
            )
            lines.append(f"Accelerator utilisation: {parts}.")
        lines += self.remarks
        lines.append(f"{self.confidence.capitalize()}.")
        return "\n".join(lines)


def report(
    records: Sequence[BatchRecord],
    setting: RecordedSettings,
    stats: LoaderStats | None = None,
    copies: Sequence[Copy] = (),
) -> Report:
    """Return the verdict on a loader, computed from its records.

    Failures and dead workers in ``stats`` become remarks. A blocked event loop outranks
    the stages that it slows down.
    """
    remarks = _remarks(stats)
    lag = None if stats is None else stats.loop_lag
    is_blocked = lag is not None and lag.share >= _LEAST_LAG and lag.culprit != ""
    is_free = lag is None or (lag.busy < _LOOP_BUSY and not is_blocked)
    alone = stats._alone if stats is not None and is_free else ()  # noqa: SLF001
    costs = costs_of(records, setting, copies, alone)
    if costs is None:
        headline = f"Too few batches to name the bottleneck: {len(records)}."
        return Report(headline, "unknown", batches=len(records), remarks=remarks)
    case = _Case(costs, setting, records, start_seconds(records, setting), lag)
    stage, advice = case.judged()
    return Report(
        headline=case.headline(stage),
        stage=stage,
        advice=advice,
        limit="" if advice else case.limit(stage),
        wait_share=case.wait_share,
        head_room=() if case.is_doubtful else head_room(costs, setting),
        batches=len(costs.step),
        model_error=case.error,
        remarks=remarks,
    )


def head_room(costs: Costs, setting: RecordedSettings) -> tuple[HeadRoom, ...]:
    """Return the accelerator's utilisation if steps had 1, 2 and 4 times the speed."""
    rooms = []
    for speed in (1, 2, 4):
        faster = costs.scaled("consumer", 1 / speed)
        seconds = seconds_per_batch(faster, setting)
        used = faster.step.mean() / seconds if seconds else 1.0
        rooms.append(HeadRoom(speed, min(1.0, float(used))))
    return tuple(rooms)


@dataclass(frozen=True)
class _Case:
    """A loader's records and costs, and the verdict computed from them."""

    costs: Costs
    setting: RecordedSettings
    records: Sequence[BatchRecord]
    start: float = 0.0  # seconds that starting workers takes per epoch
    lag: LoopLag | None = None

    @cached_property
    def settled(self) -> Sequence[BatchRecord]:
        """The records without the first ones, which are late.

        The first batches wait until workers have started and the window is full.
        """
        records = self.records
        first = min(len(records) // 4, window_of(self.setting, self.costs))
        return records[max(first, len(records) - len(self.costs.step) - 1) :]

    @cached_property
    def measured(self) -> float:
        """The measured seconds per batch, from the ``settled`` records."""
        settled = self.settled
        return (settled[-1].taken - settled[0].taken) / (len(settled) - 1)

    @cached_property
    def wait_share(self) -> float:
        """Share of the time that the consumer waits for batches or the GIL."""
        waits = [record.taken - record.asked for record in self.settled[1:]]
        waited = sum(waits) / len(waits) + self.costs.locked
        return min(1.0, waited / self.measured) if self.measured else 0.0

    @cached_property
    def now(self) -> float:
        """The computed seconds per batch under the recorded settings."""
        return seconds_per_batch(self.costs, self.setting)

    @cached_property
    def error(self) -> float:
        """Error of the computed seconds per batch, as a share of the measured ones."""
        seconds, records, count = self.now, self.records, len(self.costs.step)
        is_ahead = self.setting.place != "inline" and self.setting.window != 0
        if is_ahead and not records[0].number and len(records) == count + 1:
            # The records cover a whole epoch, in which batches may long come in bursts.
            first = len(records) - len(self.settled)
            requests = self.setting.length or inf
            taken = taken_times(self.costs, self.setting, count + 1, requests)
            seconds = pace(taken[first:])
        measured = pace([record.taken for record in self.settled])
        return seconds / measured - 1 if measured else 0.0

    @property
    def is_guess(self) -> bool:
        """Whether too few batches were measured to advise anything."""
        return len(self.costs.step) < _LEAST_BATCHES

    @property
    def is_doubtful(self) -> bool:
        """Whether the computed pace differs too much from the measured one."""
        return abs(self.error) > _MAX_ERROR

    @cached_property
    def cores(self) -> float:
        """How many times faster this machine's processors could do the same work."""
        setting, costs = self.setting, self.costs
        used = setting.used
        is_apart = setting.place == "workers" and not setting.is_shared
        if is_apart and costs.is_measured and self.measured:
            used += costs.cpu / self.measured
        return setting.cores * (1 - costs.delay) * _inverse(used)

    def most(self, change: Change) -> float:
        """Return the largest speed-up, as a factor, that measurements allow a change.

        At best, the consumer waits only for the sampler, and all processors are busy.
        If the change keeps the workers, the event loop's thread is another limit. If
        threads would make batches, this process's use of the GIL is a limit as well.
        """
        setting, then = self.setting, change.setting
        drawing = float(self.costs.sampler.mean()) / max(self.measured, 1e-9)
        waits = _inverse(1 - max(0.0, self.wait_share - drawing))
        if change.start < 0:
            return 1.0  # the change only saves starts
        if then == setting:
            return waits  # the change reduces the work itself
        bounds = [waits, max(1.0, self.cores)]
        if then.is_shared:
            bounds.append(_inverse(setting.used / max(1e-9, 1 - self.costs.delay)))
        parts = ("place", "workers", "worker_kind")
        if all(getattr(then, part) == getattr(setting, part) for part in parts):
            bounds.append(_inverse(0.0 if self.lag is None else self.lag.busy))
        return min(bounds)

    def gain(self, change: Change) -> float:
        """Return a change's speed-up over whole epochs, in percent."""
        then = seconds_per_batch(change.costs, change.setting)
        then = max(then, self.now / self.most(change))
        share = then / self.now if self.now else 1.0
        length, start = self.setting.length or inf, self.start
        now = self.measured + start / length
        then = self.measured * share + (start + change.start) / length
        return 100 * (now / then - 1) if then else 0.0

    def best(self) -> tuple[Change, float] | None:
        """Return the change to make and its speed-up in percent, or None.

        Return None if no change is worth it or too few batches are measured. Arguments
        are preferred to new code if they reach three quarters of its speed. The result
        is the cheapest change within 5 percent of the fastest; of equally cheap ones,
        the first, which changes least. Keeping workers is advised despite any error of
        the model, because the time of their starts is measured.
        """
        if self.is_guess:
            return None
        candidates = changes(self.costs, self.setting, self.start)
        tried = [(change, self.gain(change)) for change in candidates]
        kept = (pair for pair in tried if pair[0].start < 0 and pair[1] >= _LEAST_GAIN)
        if self.is_doubtful:
            return next(kept, None)
        arguments = [pair for pair in tried if pair[0].cost < 4]
        for group, as_good in (arguments, _AS_FAST), (tried, 1.0):
            best = max((gain for _, gain in tried), default=0.0)
            most = max((gain for _, gain in group), default=0.0)
            if most < self.enough or 100 + most < as_good * (100 + best):
                continue
            least = max(self.enough, _AS_GOOD * (100 + most) - 100)
            good = [(change, gain) for change, gain in group if gain >= least]
            return min(good, key=lambda pair: pair[0].cost)
        return next(kept, None)

    @property
    def enough(self) -> float:
        """The least speed-up worth advising, in percent: 5, plus the model's error."""
        return _LEAST_GAIN + 100 * abs(self.error)

    def judged(self) -> tuple[str, Advice | None]:
        """Return the stage that limits training, and the advice, if any."""
        best = self.best()
        if best is not None and best[0].argument == "persistent_workers":
            stage = "start"
        else:
            stage = self._slowest() if self.wait_share >= _LEAST_WAIT else "nothing"
        advice = None
        if best is not None and stage not in _UNSEEN:
            change, gain = best
            advice = Advice(change.argument, change.old, change.new, gain, change.why)
        if self.lag is not None and self.wait_share >= _LEAST_WAIT:
            freed = self._freed(self.lag, advice)
            if freed is not None:
                return "loop", freed if self.lag.culprit else None
        return stage, advice

    def _slowest(self) -> str:
        """Return the stage that would save the most time at twice its speed."""
        has_device = self.setting.on_device > 0
        stages = [stage for stage in _STAGES if has_device or stage != "device"]
        halved = [self.costs.scaled(stage, 0.5) for stage in stages]
        seconds = [seconds_per_batch(costs, self.setting) for costs in halved]
        return stages[seconds.index(min(seconds))]

    def _freed(self, lag: LoopLag, advised: Advice | None) -> Advice | None:
        """Return the advice to unblock the event loop; its speed-up is an upper bound.

        Return None if the loop is not the limit, batches are few, or it saves little.
        """
        is_known = lag.culprit or lag.is_unseen
        if not is_known or lag.share < _LEAST_LAG or self.is_guess:
            return None
        # How many calls a process pool or asyncio.to_thread would run at a time.
        setting = self.setting
        most = setting.cores if lag.computes else setting.concurrency
        most = 1000 if lag.is_callers else most
        free = self.measured * max(1 - lag.share, 1 / most)
        seconds = max(float(self.costs.step.mean()), free)
        gain = 100 * (self.measured / seconds - 1) if seconds else 0.0
        why = (
            f"it blocks the loop {lag.share:.0%} of the time, up to "
            f"{seconds_text(lag.seconds)} at a time, and nothing else is read meanwhile"
        )
        if lag.is_callers:
            why = f"{lag.culprit} {why.removeprefix('it ')}"
            advice = Advice("loop", "'caller'", "'thread'", gain, why)
        else:
            new = "a process pool" if lag.computes else "asyncio.to_thread"
            advice = Advice(lag.culprit, "the event loop", new, gain, why)
        if lag.computes and advised is not None and advised.argument == "num_workers":
            advice = advised  # workers do not share a GIL with the loop
        return advice if advice.gain >= _LEAST_GAIN else None

    def headline(self, stage: str) -> str:
        """Return what limits training, in one sentence."""
        is_locked = 0 < _LEAST_WAIT * self.measured <= self.costs.locked
        causes = "batches and for the interpreter's lock" if is_locked else "batches"
        waits = f"training waits for {causes} {self.wait_share:.0%} of the time"
        culprit = "" if self.lag is None else self.lag.culprit
        took = seconds_text(self.start)
        is_on_host = stage == "device" and self.setting.stays_on_host
        if stage == "start":
            return f"Starting workers is the bottleneck: it takes {took} of each epoch."
        if stage == "loop" and not culprit:
            return f"The event loop that reads samples is blocked: {waits}."
        if stage == "loop":
            return f"The bottleneck is {culprit}, which blocks the event loop: {waits}."
        words = _ON_HOST if is_on_host else _WORDS[stage]
        if stage == "sampler" and self.setting.sampler:
            words = words.replace("sampler", f"sampler ({self.setting.sampler})")
        return f"{words}: {waits}."

    def limit(self, stage: str) -> str:
        """Return why there is no advice, and what limits the speed, as text."""
        setting = self.setting
        none = f"No argument would bring {times_text(self.enough)} the steps per second"
        is_handed = stage == "transport" and setting.place in {"thread", "workers"}
        is_store = stage == "read" and waits_for_store(self.costs, setting)
        is_stream = stage == "read" and setting.is_stream and not setting.is_replicated
        is_link = stage == "device" and not setting.stays_on_host
        cores = (
            f"No argument would help: all {setting.cores} cores are busy, with "
            "batches, your training step or other processes."
        )
        handed = "No argument would help: make batches larger, so that fewer are moved."
        doubtful = (
            "No advice: the seconds per batch computed from these batches differ from "
            f"the measured ones by {self.error:+.0%}."
        )
        idle = "No argument would make training faster."
        few = f"No advice yet: {len(self.costs.step)} batches are too few to measure a "
        few += f"speed-up. Call report() after more than {_LEAST_BATCHES} of one epoch."
        link = "The link to the device is the limit: make batches smaller in bytes."
        steps = f"{none}: move work from the stream's steps to transform=, which runs "
        steps += "in workers, or read more shards at once (interleave=)."
        sampler = "No argument would help: a sampler runs in the thread that iterates. "
        sampler += f"Let {setting.sampler or 'it'} prepare many indices at a time, or "
        sampler += "work in another thread."
        alone = float(self.costs.least * self.costs.served)
        queued = "No argument would help: your client or store seems to serve reads "
        queued += f"about {self.costs.served:.0f} at a time. One takes "
        queued += (
            f"{seconds_text(alone)} alone, and longer among {setting.concurrency}. "
        )
        queued += "Raise the limit there: the size of a connection pool, a semaphore, "
        queued += "threads."
        unseen = "Iterate on, and call report() again: it then says what blocks it."
        texts = (
            (stage == "nothing", idle),
            (stage == "loop", unseen),
            (self.is_guess, few),
            (stage == "read" and self.costs.served > 0, queued),
            (self.is_doubtful, doubtful),
            (stage == "consumer", idle),
            (stage == "sampler", sampler),
            (self.cores < _CORES_BUSY, cores),
            (is_handed, handed),
            (is_stream, steps),
            (is_store, f"{none}: the store is the limit."),
            (is_link, link),
            (True, f"{none}: this stage must do less work."),
        )
        return next(text for is_so, text in texts if is_so)


def _inverse(share: float) -> float:
    return 1 / share if share > 0 else inf


def _remarks(stats: LoaderStats | None) -> tuple[str, ...]:
    if stats is None:
        return ()
    counts = {
        "samples failed": stats.failures,
        "worker processes died": stats.worker_deaths,
        "worker processes were started again": stats.worker_restarts,
    }
    return tuple(f"{count:,} {event}." for event, count in counts.items() if count)
