"""The unit of work: one batch on its way from indices to tensors."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aioloader._base.machine import RunTimes
from aioloader._base.records import NOT_MADE, BatchTimes

MISSING: Final = object()
"""Placeholder for a sample still being read."""
_NOTHING = RunTimes()


@dataclass(eq=False, repr=False)
class BatchResult:
    """The result of one request: a batch, an error, nothing, or the end."""

    batch: Any = None
    error: BaseException | None = None
    is_empty: bool = False  # every sample was skipped: there is no batch
    is_end: bool = False  # the stream had ended
    has_ended: bool = False  # its reader had ended; others may have more
    state: Any = None  # the state of its reader (sampler or stream) after it, if known
    # What follows stays in the class unless it is set: results are made quickly.
    attempted: int = field(default=0, init=False)  # that a worker tried; counted later
    failures: Sequence[Any] = field(default=(), init=False)  # skipped, or replaced
    retries: int = field(default=0, init=False)  # of a worker, since its last result
    # Of a stateful map-style dataset: the worker whose copy made it (0 for this
    # process), and the state of that copy after it.
    dataset: tuple[int, Any] | None = field(default=None, init=False)
    made: BatchTimes = field(default=NOT_MADE, init=False)  # when, for the records
    worker: int = field(default=0, init=False)  # by which worker
    size: int = field(default=0, init=False)  # how many samples it has


@dataclass(eq=False, repr=False)
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
    # What follows stays in the class unless it is set: ``"fetch"``, ``"transform"``,
    # ``"collate"`` or ``"pool"``.
    stage: str = field(default="fetch", init=False)
    turn: int = field(
        default=0, init=False
    )  # of its first job in the fetchers of a loop
    result: BatchResult | None = field(default=None, init=False)  # once it is known
    missing: int = field(default=0, init=False)  # samples skipped, or after the end
    failures: Sequence[Any] = field(default=(), init=False)  # skipped, or replaced
    extra: int = field(default=0, init=False)  # tried by a stream beyond ``indices``
    state: Any = field(default=None, init=False)  # as in ``BatchResult``
    # Until ``spent``: as in ``BatchTimes``.
    began = read = started = transformed = collated = busy = 0.0
    spent: RunTimes = field(default=_NOTHING, init=False)  # of processors, and waits
    again: bool = field(default=False, init=False)  # padding: a stream's beginning

    @property
    def size(self) -> int:
        return len(self.indices) - self.missing

    def made(self) -> BatchTimes:
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


@dataclass(eq=False, repr=False)
class Window:
    """How many batches may be in flight."""

    # Their number; with ``samples``, the number on top of those being read.
    batches: int
    # How many samples to have in flight, whatever the batch sizes; 0: only batches
    # count.
    samples: int = 0
    is_lazy: bool = False  # whether a batch only starts while its consumer waits for it
    # Whether more may be in flight if they are made fast: what is made in ``HOP``.
    runs: bool = False
    most: int = sys.maxsize  # upper limit on batches in flight
