"""Records of batches, always kept: a few clock readings of each of the latest ones.

All statistics of a loader are computed from these records on request; the hot path
appends one tuple per batch. The clock is ``time.perf_counter``, which all processes of
a machine share; times of workers on other machines are converted (``remote_tasks``).
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

# Batches whose records are kept.
KEPT = 1024
# Processor time and bytes are measured for one batch in this many, from the second on
# (the first is atypical), and for a few early ones, because epochs may be short.
_CLOCKED_EVERY, _CLOCKED_EARLY = 16, frozenset((3, 7, 15))
# Seconds: a quicker batch cannot have waited for a processor often.
_QUICK_BATCH = 5e-4
_MEASURED_ITEMS = 16  # of a batch
_SIZES = {int: 8, float: 8, bool: 8, type(None): 8}

# When and where a batch was made; clock readings in seconds. A plain tuple costs a
# fifth of a named one.
BatchTimes: TypeAlias = tuple[
    float,  # reading started; for a stream, the batch was requested
    float,  # all of its samples were read
    float,  # transform and collate started; later than that if they waited
    float,  # all of its samples were transformed
    float,  # it was collated
    # Seconds that coroutines took for single samples, summed over these: to read them,
    # or else to transform them; 0 if there were none.
    float,
    # Seconds of processor time of the plain code that made it, reads included unless
    # coroutines did them; measured for some batches only, otherwise 0.
    float,
    # Seconds in which that code was ready to run and waited for a processor; measured
    # with the processor time, where the system tells.
    float,
]
RecordTuple: TypeAlias = tuple[int, float, float, int, int, BatchTimes, float]
NOT_MADE: BatchTimes = (0.0,) * 8


def is_clocked(number: int) -> bool:
    """Tell whether processor time and bytes of this batch are measured."""
    return number % _CLOCKED_EVERY == 1 or number in _CLOCKED_EARLY


def thread_clocks(number: int, seconds: float = 1.0) -> RunTimes | None:
    """Return this thread's times; None for most batches: reading them takes 20 us.

    The waits for a processor are read only if the batch before was slow.
    """
    if not is_clocked(number):
        return None
    return run_times() if seconds > _QUICK_BATCH else RunTimes(time.thread_time(), -1.0)


def spent(since: RunTimes) -> RunTimes:
    """Return the times that this thread has spent since ``since`` was read."""
    if since.delayed < 0:
        return RunTimes(time.thread_time() - since.cpu)
    return run_times() - since


class BatchRecord(NamedTuple):
    """One delivered batch."""

    number: int  # place in the epoch
    asked: float  # when its consumer asked for it
    taken: float  # when the consumer got it
    worker: int  # number of the worker that made it; 0 without workers
    samples: int  # how many samples it has
    made: BatchTimes
    # Seconds of these in which indices were drawn, of this batch or later ones.
    drawn: float = 0.0


class Copy(NamedTuple):
    """One batch that was moved to a device; clock readings in seconds."""

    number: int  # place in the epoch
    asked: float  # when there was room for it on the device
    began: float  # when the loader's thread started to move it
    ended: float  # when its copy was observed to have ended
    nbytes: int  # bytes copied


class Latest(deque[T]):
    """The latest records of one epoch; sinks get each later record, too."""

    append: Callable[[T], None]

    def __init__(self) -> None:
        super().__init__(maxlen=KEPT)
        self._sinks: tuple[Callable[[T], None], ...] = ()

    def add_sink(self, sink: Callable[[T], None]) -> None:
        """Call ``sink`` with each later record, in the thread that adds it."""
        self._pass_to((*self._sinks, sink))

    def remove_sink(self, sink: Callable[[T], None]) -> None:
        self._pass_to(tuple(kept for kept in self._sinks if kept != sink))

    def _pass_to(self, sinks: tuple[Callable[[T], None], ...]) -> None:
        self._sinks, add = sinks, super().append
        self.append = partial(_add, (add, *sinks)) if sinks else add


def _add(sinks: tuple[Callable[[T], None], ...], record: T) -> None:
    for append in sinks:
        append(record)


# The latest batches of one epoch; added by the consumer.
Records: TypeAlias = Latest[RecordTuple]


@dataclass(eq=False, repr=False)
class RecordedSettings:
    """How a loader was set up for an epoch, as far as its speed depends on it."""

    # Where batches are made. ``"inline"``: in the consumer's thread, on request.
    # ``"thread"``: by plain code in another thread. ``"loop"``: read by coroutines, on
    # the loader's event loop or the consumer's. ``"workers"``: by workers.
    place: Literal["inline", "thread", "loop", "workers"]
    workers: int = 0  # number of workers; 0 without
    worker_kind: str = ""  # "process", "thread", or the name of an executor's class
    reads_in_workers: bool = False  # whether workers read the samples
    # How many samples coroutines of each reader read, or transform, at a time; 1
    # without coroutines.
    concurrency: int = 1
    reads_async: bool = True  # whether coroutines read, if there are any
    # Whether coroutines transform batches that have been read.
    transforms_async: bool = False
    # Limit on batches requested and not delivered; None if it follows their sizes or
    # speed; 0 if a batch only starts when requested.
    window: int | None = 1
    batch_size: int | None = 1  # samples per batch; None if a batch sampler decides
    is_stream: bool = False  # whether an iterable is read, block by block
    # Whether each worker iterates over a copy of the user's iterable.
    is_replicated: bool = False
    in_order: bool = True  # whether batches are delivered in the sampler's order
    # How many batches are moved to the device ahead, or page-locked or passed to
    # ``Device.transform``; 0 without such a stage.
    on_device: int = 0
    stays_on_host: bool = False  # whether there is such a stage without a device
    is_persistent: bool = False  # whether workers are kept between epochs
    start_method: str = "fork"  # how worker processes start, or would start
    sampler: str = ""  # class of the sampler, or batch sampler, that draws indices
    cores: int = 1  # how many cores this process may use; filled in when needed
    # How many of them it has used meanwhile, worker processes not included; 0 if not
    # known. Filled in when needed, as is the rest.
    used: float = 0.0
    epochs_before: int = 0  # how many epochs were before this one
    length: int = 0  # how many batches this one has; so far, if it has no length
    # Arguments that advice leaves out: they have no effect here, or are "auto".
    fixed: tuple[str, ...] = ()

    @property
    def is_coupled(self) -> bool:
        """Whether one thread reads, transforms and collates a batch in one go."""
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
        """How many reads run at a time: of batches if coupled, or of samples."""
        is_one_by_one = self.is_coupled or self.is_stream or not self.reads_async
        return self._readers * (1 if is_one_by_one else max(1, self.concurrency))

    @property
    def transforming_lanes(self) -> int:
        """How many samples coroutines transform at a time, after reading."""
        return self._readers * max(1, self.concurrency)

    @property
    def _readers(self) -> int:
        reads_here = self.place != "workers" or not self.reads_in_workers
        return 1 if reads_here else max(1, self.workers)

    @property
    def making_starts(self) -> int:
        """Index in ``BatchTimes`` of the time at which plain code starts on a batch."""
        if self.transforms_async:
            return 3
        return 0 if self.is_coupled else 2

    @property
    def making_lanes(self) -> int:
        """How many batches are collated, or transformed by plain code, at a time."""
        return max(1, self.workers) if self.place == "workers" else 1

    @property
    def processors(self) -> int:
        """How many workers may compute at a time: one if they share the GIL."""
        is_one = self.place == "workers" and self.is_shared
        return 1 if is_one else max(1, self.cores)


@dataclass(frozen=True)
class LoopLag:
    """How an event loop was blocked while samples were read on it.

    ``culprit`` is not blamed for time in which its thread waits for a processor, or for
    the GIL that another thread holds.

    Attributes:
        seconds: How long at a time: the 95th percentile.
        share: Share of the time in which it was blocked, from 0 to 1.
        culprit: Name and location of the blocking coroutine; ``""`` if none was found.
        computes: Whether the coroutine computes; if not, it waits for a lock or a
            system call.
        is_callers: Whether it is the caller's loop.
        busy: Share of the time in which its thread computed, or could have.
        is_unseen: Whether no culprit was looked for yet: ``DataLoader.report`` starts
            looking, for later batches.
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
    """The counters of a source; one per epoch."""

    reads_whole: ClassVar[bool] = False  # as in ``HasEpoch``
    epoch: int = -1  # epoch number, from 0; -1 before the first
    batches: int = 0  # batches delivered
    waited: float = 0.0  # seconds the consumer waited for batches that were not ready
    drawn: float = 0.0  # seconds of these in which indices were drawn
    in_flight: int = 0  # batches requested and not yet delivered
    records: Records = field(default_factory=Latest)  # of the latest batches
    # How the loader is set up, once needed; what returns it (None: batches are made
    # inline).
    setting: RecordedSettings | None = None
    describe: Callable[[], RecordedSettings] | None = None
    weighed: int = 0  # how many batches had their bytes counted
    bytes: int = 0  # the bytes of these
    # The time and this process's processor time at the latest of these.
    clocks: deque[tuple[float, float]] = field(
        default_factory=partial(deque, maxlen=KEPT // _CLOCKED_EVERY)
    )
    listed_shards: int = 0  # of a stream, before the first was read, if listed here
    listed_seconds: float = 0.0  # how long it took
    # Seconds of reads that coroutines began while few others ran.
    alone: Sequence[float] = ()
    # Returns how the event loop that reads samples is blocked; None if there is no
    # loop.
    lag: Callable[[], LoopLag | None] | None = None
    is_asked: bool = False  # whether a thread may look for what blocks it
    # The latest copies to the device; added by the thread that makes them.
    copies: Latest[Copy] = field(default_factory=Latest)
    moved_bytes: int = 0  # device memory of all moved batches; written by that thread
    taken_bytes: int = 0  # of delivered batches; written by the consumer's thread
    # Identifies the iteration: two may have the same epoch number.
    iteration: object = field(default_factory=object)

    def weigh(self, batch: Any) -> None:
        """Count the bytes of a batch; called for every 16th or so."""
        self.weighed += 1
        self.bytes += bytes_of(batch)
        self.clocks.append((time.perf_counter(), time.process_time()))

    def recorded(self) -> list[BatchRecord]:
        return [BatchRecord(*record) for record in list(self.records)]

    def ahead_bytes(self) -> int:
        """Return the device memory of batches moved and not yet delivered, in bytes."""
        return max(0, self.moved_bytes - self.taken_bytes)

    def used(self) -> float:
        """Return how many cores this process has used lately; 0 if not known."""
        clocks = list(self.clocks)
        if len(clocks) < 2:
            return 0.0
        (began, before), (ended, after) = clocks[0], clocks[-1]
        return (after - before) / max(1e-9, ended - began)


class Pace:
    """How quickly a loader's batches are made, in all its epochs."""

    seconds: float = 0.0  # per batch, the least of late; 0: not known


# Set in the tasks of an iteration; code that lists shards adds to it.
COUNTERS: ContextVar[Counters | None] = ContextVar("aioloader_counters", default=None)


def bytes_of(batch: Any, items: int = _MEASURED_ITEMS, depth: int = 8) -> int:
    """Return the bytes of tensors, arrays, bytes and text in nested containers.

    Of many items only a few, evenly spaced, are measured.
    """
    try:
        nbytes = _SIZES.get(type(batch)) or getattr(batch, "nbytes", None)
        if nbytes is not None:
            return int(nbytes)
    except Exception:  # noqa: S110  (a sparse tensor's; any class's own)
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
