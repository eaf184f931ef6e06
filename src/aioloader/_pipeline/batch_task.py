"""The task of making one batch from indices, and the batch's result."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aioloader._base.machine import RunTimes
from aioloader._base.records import NOT_MADE, BatchTimes

MISSING: Final = object()
"""Placeholder for a sample still being read."""
_NO_TIMES = RunTimes()


@dataclass(eq=False, repr=False)
class BatchResult:
    """The result of one request: a batch, an error, no batch, or the stream's end."""

    batch: Any = None
    error: BaseException | None = None
    is_empty: bool = False  # every sample was skipped: there is no batch
    is_end: bool = False  # the stream had ended
    has_ended: bool = False  # its reader had ended; other readers may have more
    state: Any = None  # its reader's (sampler's or stream's) state after it, if known
    # These stay class attributes until they are set: the constructor is quicker.
    attempted: int = field(default=0, init=False)  # samples that a worker tried
    failures: Sequence[Any] = field(default=(), init=False)  # skipped, or replaced
    retries: int = field(default=0, init=False)  # by a worker, since its last result
    # Of a stateful map-style dataset: the worker whose copy was read (0 for this
    # process), and the state of that copy after the batch.
    dataset: tuple[int, Any] | None = field(default=None, init=False)
    made: BatchTimes = field(default=NOT_MADE, init=False)
    worker: int = field(default=0, init=False)  # number of the worker that made it
    size: int = field(default=0, init=False)  # in samples


@dataclass(eq=False, repr=False)
class BatchTask:
    """The task of making one batch; the batch's current stage owns this object."""

    number: int  # position in the epoch, from 0
    indices: Sequence[Any]  # from the sampler; for a stream, positions
    key: int | None = None  # seeds the generators for its plain code
    # If each sample has its own seed: the epoch's seed, the position of the first
    # sample in the epoch, and the step to the next.
    sample_keys: tuple[int, int, int] | None = None
    padding: int = 0  # how many of its samples, the last ones, are padding
    # The samples, with ``MISSING`` for those still being read, or what ``__getitems__``
    # has returned, of any type.
    samples: Any = field(default_factory=list)
    # Class attributes until set. The stage: "fetch", "transform", "collate", "pool".
    stage: str = field(default="fetch", init=False)
    turn: int = field(default=0, init=False)  # its priority in a ``FetcherPool``
    result: BatchResult | None = field(default=None, init=False)  # once it is known
    missing: int = field(default=0, init=False)  # samples skipped, or after the end
    failures: Sequence[Any] = field(default=(), init=False)  # skipped, or replaced
    extra: int = field(default=0, init=False)  # tried by a stream, minus ``indices``
    state: Any = field(default=None, init=False)  # as in ``BatchResult``
    # These and ``spent``: as in ``BatchTimes``.
    began = read = started = transformed = collated = busy = 0.0
    spent: RunTimes = field(default=_NO_TIMES, init=False)
    again: bool = field(default=False, init=False)  # repeats a stream's first samples

    @property
    def size(self) -> int:
        return len(self.indices) - self.missing

    def made(self) -> BatchTimes:
        """Return the times of the batch's steps; 0 for steps still to come."""
        started = self.started or self.transformed  # without a transform
        times = self.began, self.read, started, self.transformed, self.collated
        return *times, self.busy, *self.spent


def shorten(indices: Sequence[Any]) -> str:
    """Return the first eight indices as text; if there are more, also their number."""
    shown = ", ".join(repr(index) for index in indices[:8])
    more = f", … ({len(indices)} in all)" if len(indices) > 8 else ""
    return f"[{shown}{more}]"


def stage_note(stage: str, epoch: int, batch: int, indices: Any) -> str:
    """Return the error note for a stage that processes whole batches."""
    place = f"in stage {stage!r} of epoch {epoch}, batch {batch}"
    return f"{place}, sample indices {shorten(indices)}"


@dataclass(eq=False, repr=False)
class Window:
    """Limits on how many batches one iteration has in flight."""

    batches: int  # if ``samples`` is set, in addition to the batches for them
    samples: int = 0  # to have in flight, in batches of any size; 0: count batches
    is_lazy: bool = False  # whether a batch only starts while its consumer waits for it
    runs: bool = False  # whether fast batches are requested in runs (``RUN_SECONDS``)
    most: int = sys.maxsize  # upper limit on batches in flight
