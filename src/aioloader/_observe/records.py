"""What is noted of each batch, always: a few clock readings, kept for the latest ones.

Everything that is shown of a loader is computed from these records when it is asked
for; the hot path appends one tuple per batch. Clocks are ``time.perf_counter``, which
is one clock for all processes of a machine (not beyond: of Ray's workers only the
differences mean something).
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")

# Batches whose records are kept.
KEPT = 1024

# When a batch was made: ``MadeAt``'s fields, as a plain tuple, which costs a fifth.
Made: TypeAlias = tuple[float, float, float, float, float, float, float]
RecordTuple: TypeAlias = tuple[int, float, float, int, int, Made]
NOT_MADE: Made = (0.0,) * 7


def processor_time(number: int) -> float:
    """Return this thread's processor time; 0 for most batches, as it costs 0.3 us."""
    return 0.0 if number % 16 else time.thread_time()


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


class Latest(Generic[T]):
    """The latest notes of one epoch.

    Attributes:
        append: Adds one. To be looked up for each batch: it changes when a sink is
            added.
        latest: Those that are kept, the latest last.
    """

    __slots__ = ("_sinks", "append", "latest")

    def __init__(self) -> None:
        self.latest: deque[T] = deque(maxlen=KEPT)
        self.append: Callable[[T], None] = self.latest.append
        self._sinks: tuple[Callable[[T], None], ...] = ()

    def add_sink(self, sink: Callable[[T], None]) -> None:
        """Have ``sink`` called with each one to come, in the thread that notes it."""
        self._sinks = (*self._sinks, sink)
        self.append = self._append_to_all

    def remove_sink(self, sink: Callable[[T], None]) -> None:
        """Undo ``add_sink``."""
        self._sinks = tuple(one for one in self._sinks if one != sink)
        if not self._sinks:
            self.append = self.latest.append

    def _append_to_all(self, record: T) -> None:
        self.latest.append(record)
        for sink in self._sinks:
            sink(record)


class Records(Latest[RecordTuple]):
    """The latest records of one epoch, as plain tuples; by the consumer's thread."""

    __slots__ = ()

    def all(self) -> list[Record]:
        """Return those that are kept."""
        return [Record._make(one) for one in list(self.latest)]


class Copies(Latest[Copy]):
    """The latest copies to the device; by the thread that makes them.

    Attributes:
        moved_bytes: What all batches of the epoch take on the device; by that thread.
        taken_bytes: The same of those that the consumer took; by its thread.
    """

    __slots__ = ("moved_bytes", "taken_bytes")

    def __init__(self) -> None:
        super().__init__()
        self.moved_bytes = self.taken_bytes = 0


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
        copies: What was moved to the device; None without one.
    """

    epoch: int = -1
    batches: int = 0
    waited: float = 0.0
    in_flight: int = 0
    records: Records = field(default_factory=Records)
    setting: Setting | None = None
    copies: Copies | None = None
