"""Records of the latest batches, each a few clock readings.

A loader always keeps records, and computes all statistics from them on request. The
hot path appends one tuple per batch. The clock is ``time.perf_counter``, which all
processes of a machine share. ``remote_tasks`` converts times of other machines.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeVar

from aioloader._base.machine import RunTimes, run_times

T = TypeVar("T")

# An epoch keeps the records of this many batches, the latest ones.
KEPT = 1024
# Processor time and bytes are measured for one batch in this many, from the second on
# (the first is atypical), and for a few early ones, because epochs may be short.
_CLOCKED_EVERY, _CLOCKED_EARLY = 16, frozenset((3, 7, 15))
# In seconds; a faster batch can hardly have waited for a processor.
_QUICK_BATCH = 5e-4
_MEASURED_ITEMS = 16  # measured per batch; the other items' bytes are extrapolated
_SIZES = {int: 8, float: 8, bool: 8, type(None): 8}

# Clock readings, in seconds, of a batch's stages. A plain tuple costs a fifth of a
# named one.
BatchTimes: TypeAlias = tuple[
    float,  # reading started; in a stream, when the batch was requested
    float,  # reading ended
    float,  # transform and collate started; they may have waited after reading
    float,  # transforming ended
    float,  # collating ended
    # Seconds that coroutines took per sample, summed over the samples: to read them, or
    # to transform them if plain code read them; 0 without coroutines.
    float,
    # Processor time of the plain code that made the batch; reads by coroutines are not
    # included. Measured for some batches (`is_clocked`), otherwise 0.
    float,
    # Seconds in which that code was ready to run and waited for a processor. Measured
    # with the processor time, on Linux only.
    float,
]
RecordTuple: TypeAlias = tuple[int, float, float, int, int, BatchTimes, float]
NOT_MADE: BatchTimes = (0.0,) * 8


def is_clocked(number: int) -> bool:
    """Tell whether processor time and bytes of batch ``number`` are measured."""
    return number % _CLOCKED_EVERY == 1 or number in _CLOCKED_EARLY


def thread_clocks(number: int, seconds: float = 1.0) -> RunTimes | None:
    """Return this thread's times; None for most batches, as a reading takes 20 us.

    ``seconds``: how long the previous batch took; if short, ``delayed`` is not read.
    """
    if not is_clocked(number):
        return None
    return run_times() if seconds > _QUICK_BATCH else RunTimes(time.thread_time(), -1.0)


def spent(since: RunTimes) -> RunTimes:
    """Return this thread's times since ``thread_clocks`` returned ``since``."""
    if since.delayed < 0:
        return RunTimes(time.thread_time() - since.cpu)
    return run_times() - since


class BatchRecord(NamedTuple):
    """The record of one delivered batch; clock readings in seconds."""

    number: int  # position in the epoch, from 0
    asked: float  # when the consumer requested it
    taken: float  # when the consumer received it
    worker: int  # number of the worker that made it; 0 without workers
    samples: int  # how many samples it has
    made: BatchTimes
    # Seconds between ``asked`` and ``taken`` in which indices of batches were drawn.
    drawn: float = 0.0


class Copy(NamedTuple):
    """One batch that was moved to a device; clock readings in seconds."""

    number: int  # position in the epoch, from 0
    asked: float  # when the device had room for it
    began: float  # when the loader's thread started the copy
    ended: float  # when the loader noticed that the copy had ended
    nbytes: int  # bytes copied


class Latest(deque[T]):
    """The latest records of one epoch; sinks are called with each new record."""

    append: Callable[[T], None]

    def __init__(self) -> None:
        super().__init__(maxlen=KEPT)
        self._sinks: tuple[Callable[[T], None], ...] = ()

    def add_sink(self, sink: Callable[[T], None]) -> None:
        """Call ``sink`` with each new record, in the thread that appends the record."""
        self._pass_to((*self._sinks, sink))

    def remove_sink(self, sink: Callable[[T], None]) -> None:
        self._pass_to(tuple(kept for kept in self._sinks if kept != sink))

    def _pass_to(self, sinks: tuple[Callable[[T], None], ...]) -> None:
        self._sinks, add = sinks, super().append
        self.append = partial(_add, (add, *sinks)) if sinks else add


def _add(sinks: tuple[Callable[[T], None], ...], record: T) -> None:
    for append in sinks:
        append(record)


# The latest batches of one epoch; the consumer's thread appends them.
Records: TypeAlias = Latest[RecordTuple]


@dataclass(eq=False, repr=False)
class RecordedSettings:
    """The settings that decide a loader's speed in one epoch."""

    # Where batches are made. ``"inline"``: in the consumer's thread, on request.
    # ``"thread"``: by plain code in another thread. ``"loop"``: coroutines read, on the
    # loader's event loop or the consumer's. ``"workers"``: in workers.
    place: Literal["inline", "thread", "loop", "workers"]
    workers: int = 0  # number of workers
    worker_kind: str = ""  # "process", "thread", or the name of an executor's class
    reads_in_workers: bool = False  # whether workers read the samples
    # How many samples the coroutines of each reader read or transform concurrently; 1
    # without coroutines.
    concurrency: int = 1
    reads_async: bool = True  # whether coroutines read, if there are any
    # Whether coroutines transform batches that have been read.
    transforms_async: bool = False
    # Limit on batches started and not yet delivered; None if it follows their sizes or
    # speed; 0 if a batch starts only when the consumer requests it.
    window: int | None = 1
    batch_size: int | None = 1  # samples per batch; None if a batch sampler decides
    is_stream: bool = False  # whether an iterable is read, in blocks
    # Whether each worker iterates over a copy of the user's iterable.
    is_replicated: bool = False
    in_order: bool = True  # whether batches are delivered in the sampler's order
    # How many batches the device stage keeps ready: moved to the device, page-locked or
    # passed to ``Device.transform``; 0 without this stage.
    on_device: int = 0
    stays_on_host: bool = False  # whether the device stage moves nothing to a device
    is_persistent: bool = False  # whether workers are kept between epochs
    start_method: str = "fork"  # how worker processes, if any, are started
    sampler: str = ""  # class name of the sampler or batch sampler
    cores: int = 1  # how many this process may use; set on demand
    # How many cores this process has used, without its worker processes; 0 if unknown.
    # Set on demand, as are the next two fields.
    used: float = 0.0
    epochs_before: int = 0  # how many epochs the loader ran before this one
    length: int = 0  # number of batches in this epoch; so far, if it has no length
    # Arguments that advice must not change: they have no effect, or are "auto".
    fixed: tuple[str, ...] = ()

    @property
    def is_coupled(self) -> bool:
        """Whether one call of plain code reads, transforms and collates a batch."""
        if self.place == "workers":
            is_plain = self.concurrency == 1 or not self.reads_async
            return self.reads_in_workers and is_plain and not self.transforms_async
        return self.place != "loop"

    @property
    def is_shared(self) -> bool:
        """Whether another thread of the consumer's process makes batches."""
        if self.place == "workers":
            return self.worker_kind in {"thread", "ThreadPoolExecutor"}
        return self.place in {"thread", "loop"}

    @property
    def reading_lanes(self) -> int:
        """How many reads run at a time: one per reader for plain code and streams."""
        is_one_by_one = self.is_coupled or self.is_stream or not self.reads_async
        return self._readers * (1 if is_one_by_one else max(1, self.concurrency))

    @property
    def transforming_lanes(self) -> int:
        """How many samples coroutines transform concurrently, after reading."""
        return self._readers * max(1, self.concurrency)

    @property
    def _readers(self) -> int:
        reads_here = self.place != "workers" or not self.reads_in_workers
        return 1 if reads_here else max(1, self.workers)

    @property
    def making_starts(self) -> int:
        """Index in ``BatchTimes`` of the time when plain code starts on a batch."""
        if self.transforms_async:
            return 3
        return 0 if self.is_coupled else 2

    @property
    def making_lanes(self) -> int:
        """How many batches plain code transforms or collates at a time."""
        return max(1, self.workers) if self.place == "workers" else 1

    @property
    def processors(self) -> int:
        """How many cores workers can use at a time; one if workers share the GIL."""
        is_one = self.place == "workers" and self.is_shared
        return 1 if is_one else max(1, self.cores)


@dataclass(frozen=True)
class LoopLag:
    """How long an event loop was blocked while samples were read on it.

    ``culprit`` is not blamed for time in which its thread waits for a processor, or for
    the GIL that another thread holds.

    Attributes:
        seconds: 95th percentile of how long the loop was blocked at a time.
        share: Share of the time in which the loop was blocked, from 0 to 1.
        culprit: Name and location of the blocking coroutine; ``""`` if none was found.
        computes: Whether the coroutine computes; if not, it waits for a lock or a
            system call.
        is_callers: Whether the loop is the caller's, not the loader's.
        busy: Share of the time in which the loop's thread ran or was ready to run.
        is_unseen: Whether the search for a culprit has not started.
            ``DataLoader.report`` starts it, for later batches.
    """

    seconds: float
    share: float
    culprit: str
    computes: bool = False
    is_callers: bool = False
    busy: float = 0.0
    is_unseen: bool = False


@dataclass(eq=False, repr=False)
class Counters:
    """The counters of one iteration over a loader; a new object per epoch."""

    reads_whole: ClassVar[bool] = False  # as in ``HasEpoch``
    epoch: int = -1  # epoch number, from 0; -1 before the first
    batches: int = 0  # how many batches were delivered
    waited: float = 0.0  # seconds the consumer waited for batches that were not ready
    drawn: float = 0.0  # seconds of that wait in which the sampler drew indices
    in_flight: int = 0  # how many batches were started and not yet delivered
    records: Records = field(default_factory=Latest)  # of the latest batches
    # The loader's settings, cached on demand; the function that returns them (None:
    # batches are made inline).
    setting: RecordedSettings | None = None
    describe: Callable[[], RecordedSettings] | None = None
    weighed: int = 0  # how many batches had their bytes counted
    bytes: int = 0  # the bytes of these batches
    # Time and this process's processor time at the latest calls of ``weigh``.
    clocks: deque[tuple[float, float]] = field(
        default_factory=partial(deque, maxlen=KEPT // _CLOCKED_EVERY)
    )
    listed_shards: int = 0  # how many shards of a stream this process listed
    listed_seconds: float = 0.0  # how long listing the shards took
    # Durations of reads that coroutines started while few others ran, in seconds.
    alone: Sequence[float] = ()
    # Returns how long the event loop that reads samples is blocked; None: no loop.
    lag: Callable[[], LoopLag | None] | None = None
    is_asked: bool = False  # whether a thread may look for what blocks the loop
    # The latest copies to the device; the copying thread appends them.
    copies: Latest[Copy] = field(default_factory=Latest)
    moved_bytes: int = 0  # device memory of all moved batches; set by that thread
    taken_bytes: int = 0  # the same for delivered ones; set by the consumer's thread
    # Identity of the iteration, since two may have the same epoch number.
    iteration: object = field(default_factory=object)

    def weigh(self, batch: Any) -> None:
        """Count a batch's bytes; called for the batches that ``is_clocked`` picks."""
        self.weighed += 1
        self.bytes += bytes_of(batch)
        self.clocks.append((time.perf_counter(), time.process_time()))

    def recorded(self) -> list[BatchRecord]:
        return [BatchRecord(*record) for record in list(self.records)]

    def ahead_bytes(self) -> int:
        """Return the device memory, in bytes, of moved batches that await delivery."""
        return max(0, self.moved_bytes - self.taken_bytes)

    def used(self) -> float:
        """Return how many cores this process used lately, on average; 0 if unknown."""
        clocks = list(self.clocks)
        if len(clocks) < 2:
            return 0.0
        (began, before), (ended, after) = clocks[0], clocks[-1]
        return (after - before) / max(1e-9, ended - began)


class Pace:
    """How fast a loader makes batches; one object for all its epochs."""

    seconds: float = 0.0  # per batch; falls at once, rises slowly; 0: unknown


# Set in an iteration's tasks, so that code that lists shards can count them.
COUNTERS: ContextVar[Counters | None] = ContextVar("aioloader_counters", default=None)


def bytes_of(batch: Any, items: int = _MEASURED_ITEMS, depth: int = 8) -> int:
    """Estimate the total bytes of a batch's tensors, arrays, numbers, bytes and texts.

    A container's total is extrapolated from about ``items`` items, evenly spaced.
    """
    try:
        nbytes = _SIZES.get(type(batch)) or getattr(batch, "nbytes", None)
        if nbytes is not None:
            return int(nbytes)
    except Exception:  # noqa: S110  (sparse tensors have none; a property may raise)
        pass
    if isinstance(batch, (list, tuple)):
        if not depth or not batch:
            return 0
        picked = batch[:: -(-len(batch) // items)]
        items = max(1, items // len(picked))
        nbytes = sum(bytes_of(item, items, depth - 1) for item in picked)
        return nbytes * len(batch) // len(picked)
    if isinstance(batch, (bytes, bytearray, str)):
        return len(batch)
    if isinstance(batch, Mapping):
        return bytes_of(list(batch.values()), items, depth)
    own = getattr(batch, "__dict__", None)
    return bytes_of(own, items, depth - 1) if own and depth else 8
