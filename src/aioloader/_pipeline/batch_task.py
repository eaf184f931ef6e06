"""The unit of work: one batch on its way from indices to tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aioloader._base.machine import RunTimes
from aioloader._base.records import NOT_MADE, Made

MISSING: Final = object()
"""Placeholder for a sample still being read."""
_NOTHING = RunTimes()


@dataclass(eq=False, repr=False, slots=True)
class BatchResult:
    """The result of one request: a batch, an error, nothing, or the end."""

    batch: Any = None
    error: BaseException | None = None
    is_empty: bool = False  # every sample was skipped: there is no batch
    is_end: bool = False  # the stream had ended
    has_ended: bool = False  # its reader had ended; others may have more
    attempted: int = 0  # samples that a worker tried to read; counted on delivery
    failures: Sequence[Any] = ()  # the samples of these that were skipped or replaced
    retries: int = 0  # how often a worker retried a read since its last result
    state: Any = None  # the state of its reader (sampler or stream) after it, if known
    # Of a stateful map-style dataset: the worker whose copy made it (0 for this
    # process), and the state of that copy after it.
    dataset: tuple[int, Any] | None = None
    made: Made = NOT_MADE  # when it was made, for the records
    lane: int = 0  # by which worker
    size: int = 0  # how many samples it has


@dataclass(eq=False, repr=False, slots=True)
class BatchTask:
    """One batch being made; owned by the stage that works on it."""

    number: int  # position in the epoch, from 0
    indices: Sequence[Any]  # the sampler's; for a stream, the numbers of its samples
    key: int | None = None  # seeds the generators for its plain code
    # If each sample has its own seed: the epoch's seed, the position of the first
    # sample in the epoch, and the step to the next.
    sample_keys: tuple[int, int, int] | None = None
    padding: int = 0  # how many of its samples, the last ones, are padding
    # Samples so far, with ``MISSING`` where one is still being read; or the result of
    # ``__getitems__``, of any type.
    samples: Any = field(default_factory=list)
    stage: str = "fetch"  # ``"fetch"``, ``"transform"``, ``"collate"`` or ``"pool"``
    turn: int = 0  # when its first job came to the lanes of a loop, among all batches
    result: BatchResult | None = None  # once known; late samples are dropped
    missing: int = 0  # how many samples it lacks: skipped ones, or after a stream's end
    failures: Sequence[Any] = ()  # the samples that were skipped or replaced
    extra: int = 0  # how many more samples a stream has tried than ``indices``
    state: Any = None  # as in ``BatchResult``
    # Until ``spent``: as in ``Made``.
    began: float = 0.0
    read: float = 0.0
    started: float = 0.0
    transformed: float = 0.0
    collated: float = 0.0
    busy: float = 0.0
    spent: RunTimes = _NOTHING  # processor time, and waits for a processor
    again: bool = False  # it is padding as a whole: samples of the stream's beginning

    @property
    def size(self) -> int:
        return len(self.indices) - self.missing

    def made(self) -> Made:
        """Return when it was made, as far as it is."""
        # Not started: there was nothing to transform.
        started = self.started or self.transformed
        times = self.began, self.read, started, self.transformed, self.collated
        return *times, self.busy, *self.spent


def shorten(indices: Sequence[Any]) -> str:
    """Return up to eight indices as text."""
    shown = ", ".join(repr(index) for index in indices[:8])
    more = f", … ({len(indices)} in all)" if len(indices) > 8 else ""
    return f"[{shown}{more}]"


def place_of(stage: str, epoch: int, batch: int, indices: Any) -> str:
    """Return the error note for a stage that processes whole batches."""
    place = f"in stage {stage!r} of epoch {epoch}, batch {batch}"
    return f"{place}, sample indices {shorten(indices)}"
