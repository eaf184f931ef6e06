"""What is noted of each batch, always: a few clock readings, kept for the latest ones.

Everything that is shown of a loader is computed from these records when it is asked
for; the hot path appends one tuple per batch. Clocks are ``time.perf_counter``, which
is one clock for all processes of a machine (not beyond: of Ray's workers only the
differences mean something).
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")

# Batches whose records are kept.
KEPT = 1024
# Processor time is taken, and bytes are counted, of one in so many batches: of the
# second, and not of the first, which is like no other.
CLOCKED = 16
# Items of a batch that are measured.
_ITEMS = 64

# When a batch was made: ``MadeAt``'s fields, as a plain tuple, which costs a fifth.
Made: TypeAlias = tuple[float, float, float, float, float, float, float]
RecordTuple: TypeAlias = tuple[int, float, float, int, int, Made]
NOT_MADE: Made = (0.0,) * 7


def processor_time(number: int) -> float:
    """Return this thread's processor time; 0 for most batches, as it costs 0.3 us."""
    return time.thread_time() if number % CLOCKED == 1 else 0.0


class MadeAt(NamedTuple):
    """When and where a batch was made; clock readings in seconds.

    Attributes:
        began: Reading of its samples began; for a batch of a stream, asking for it.
        read: All of its samples were there.
        started: Transform and collate began; later than ``read`` if they had to wait.
        transformed: All of its samples were transformed.
        collated: It was collated.
        busy: Seconds spent in reading, summed over samples that were read at the same
            time; 0: as long as from ``began`` to ``read``.
        cpu: Seconds of processor time from ``began`` to ``collated`` where one thread
            did all of it; only measured for each 16th batch, else 0.
    """

    began: float
    read: float
    started: float
    transformed: float
    collated: float
    busy: float
    cpu: float


class Record(NamedTuple):
    """One delivered batch.

    Attributes:
        number: Place in the epoch.
        asked: When its consumer asked for it.
        taken: When the consumer got it.
        lane: Number of the worker that made it; 0 where there is one place only.
        samples: How many samples it has.
        made: A ``MadeAt`` as a plain tuple.
    """

    number: int
    asked: float
    taken: float
    lane: int
    samples: int
    made: Made


class Copy(NamedTuple):
    """One batch that was moved to a device; clock readings in seconds.

    Attributes:
        number: Place in the epoch.
        asked: When there was room for it on the device.
        began: When the loader's thread began to move it.
        ended: When its copy was seen to have ended.
        nbytes: How much was copied.
    """

    number: int
    asked: float
    began: float
    ended: float
    nbytes: int


class _Forwarding(deque[T]):
    """Notes that are handed to sinks as they are added."""

    sinks: tuple[Callable[[T], None], ...] = ()

    def append(self, note: T) -> None:
        super().append(note)
        for sink in self.sinks:
            sink(note)


@dataclass(slots=True)
class Latest(Generic[T]):
    """The latest notes of one epoch.

    Attributes:
        latest: Those that are kept, the latest last. To be looked up for each one that
            is added: it changes when a sink is added.
    """

    latest: deque[T] = field(default_factory=partial(deque, maxlen=KEPT))

    def add_sink(self, sink: Callable[[T], None]) -> None:
        """Have ``sink`` called with each one to come, in the thread that notes it."""
        forwarding = _Forwarding(self.latest, KEPT)
        forwarding.sinks = (*self._sinks(), sink)
        self.latest = forwarding

    def remove_sink(self, sink: Callable[[T], None]) -> None:
        """Undo ``add_sink``."""
        left = tuple(one for one in self._sinks() if one != sink)
        if not left:
            self.latest = deque(self.latest, KEPT)
        elif isinstance(self.latest, _Forwarding):
            self.latest.sinks = left

    def _sinks(self) -> tuple[Callable[[T], None], ...]:
        return self.latest.sinks if isinstance(self.latest, _Forwarding) else ()


class Records(Latest[RecordTuple]):
    """The latest records of one epoch, as plain tuples; by the consumer's thread."""

    __slots__ = ()

    def all(self) -> list[Record]:
        """Return those that are kept."""
        return [Record._make(one) for one in list(self.latest)]


@dataclass(slots=True)
class Copies(Latest[Copy]):
    """The latest copies to the device; by the thread that makes them.

    Attributes:
        moved_bytes: What all batches of the epoch take on the device; by that thread.
        taken_bytes: The same of those that the consumer took; by its thread.
    """

    moved_bytes: int = 0
    taken_bytes: int = 0


@dataclass(frozen=True)
class Setting:
    """How a loader was set up for an epoch, as far as its speed depends on it.

    Attributes:
        place: Where batches are made. ``"inline"``: in the consumer's thread, when it
            asks. ``"thread"``: by plain code in one thread beside it. ``"loop"``: read
            by coroutines on an event loop beside it, or on the consumer's.
            ``"workers"``: by workers.
        workers: Their number; 0 without.
        worker_kind: ``"process"``, ``"thread"``, or the name of an executor's class;
            ``""`` without workers.
        reads_in_workers: Whether workers read the samples; else they get them.
        concurrency: How many samples are read at a time by each reader, where
            coroutines read them; else 1.
        window: How many batches may be requested and not taken, at most; None where
            that follows their sizes or speed; 0 where a batch is not started until it
            is asked for.
        batch_size: Samples of a batch; None if a batch sampler decides.
        is_stream: Whether an iterable is read one block after the other.
        in_order: Whether batches are delivered in the sampler's order.
        on_device: How many batches are on the device ahead; 0 without ``device``.
        cores: How many cores this process may use; filled in when it is needed.
    """

    place: Literal["inline", "thread", "loop", "workers"]
    workers: int = 0
    worker_kind: str = ""
    reads_in_workers: bool = False
    concurrency: int = 1
    window: int | None = 1
    batch_size: int | None = 1
    is_stream: bool = False
    in_order: bool = True
    on_device: int = 0
    cores: int = 1


@dataclass(frozen=True)
class LoopLag:
    """How an event loop was held up while samples were read on it.

    Attributes:
        seconds: For how long at a time, at most: what 95 percent do not exceed.
        share: For which share of the time, from 0 to 1.
        culprit: Name and place of the coroutine that held it; ``""`` if none was found.
        computes: Whether it computes meanwhile; if not, it waits, for a lock or a
            system call.
        is_callers: Whether it is the loop of the loader's caller.
    """

    seconds: float
    share: float
    culprit: str
    computes: bool = False
    is_callers: bool = False


@dataclass(slots=True)
class Listed:
    """How the shards of an epoch were listed, before the first was read.

    Attributes:
        shards: How many there are.
        seconds: How long it took.
    """

    shards: int = 0
    seconds: float = 0.0


# Set in the tasks of an iteration: what those that list shards add to.
LISTED: ContextVar[Listed | None] = ContextVar("aioloader_listed", default=None)


@dataclass(slots=True)
class Counters:
    """What a source counts as it goes; one per epoch.

    Attributes:
        epoch: Epoch number, from 0; -1 before the first.
        batches: Batches delivered.
        waited: Seconds the consumer waited for batches that were not ready.
        in_flight: Batches requested and not yet taken.
        records: What was noted of the latest batches.
        setting: How the loader is set up; None for a plain loop over a dataset.
        weighed: Of how many batches the bytes were counted.
        bytes: The bytes of these.
        listed: How the shards of a stream were listed, if that was done here.
        lag: Returns how the event loop is held up on which samples are read; None where
            there is none.
        copies: What was moved to the device; None without one.
    """

    epoch: int = -1
    batches: int = 0
    waited: float = 0.0
    in_flight: int = 0
    records: Records = field(default_factory=Records)
    setting: Setting | None = None
    weighed: int = 0
    bytes: int = 0
    listed: Listed | None = None
    lag: Callable[[], LoopLag | None] | None = None
    copies: Copies | None = None

    def weigh(self, batch: Any) -> None:
        """Count the bytes of a batch: each 16th is enough."""
        self.weighed += 1
        self.bytes += bytes_of(batch)


def bytes_of(batch: Any, items: int = _ITEMS, depth: int = 8) -> int:
    """Return the bytes of tensors, arrays, bytes and text in nested containers.

    Of many items some are measured.

    Args:
        batch: What is measured.
        items: How many items of it, at most, of all levels.
        depth: How many levels, at most.
    """
    if isinstance(batch, (bytes, bytearray, str)):
        return len(batch)
    if isinstance(batch, Mapping):
        return bytes_of(list(batch.values()), items, depth)
    if isinstance(batch, (list, tuple)):
        if not depth or not batch:
            return 0
        some = batch[:: -(-len(batch) // items)]
        items = max(1, items // len(some))
        found = sum(bytes_of(one, items, depth - 1) for one in some)
        return found * len(batch) // len(some)
    try:
        return int(batch.nbytes)
    except Exception:  # noqa: BLE001  (a sparse tensor's; any class's own)
        own = getattr(batch, "__dict__", None)
        return bytes_of(own, items, depth - 1) if own and depth else 8
