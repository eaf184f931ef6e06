"""The unit of work: one batch on its way from indices to tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aioloader._observe.machine import RunTimes
from aioloader._observe.records import NOT_MADE, Made

MISSING: Final = object()
"""Placeholder for a sample still being read."""
_NOTHING = RunTimes()


@dataclass(slots=True, eq=False)
class BatchResult:
    """The result of one request: a batch, an error, nothing, or the end.

    Attributes:
        is_empty: Every sample was skipped: there is no batch.
        is_end: The stream had ended.
        has_ended: The reader whose turn it was had ended; others may have more.
        attempted: Samples that a worker process tried to read; counted on delivery.
        failures: The samples of these that were skipped or replaced.
        retries: How often a worker retried a read since its last result.
        state: The state of its reader (sampler or stream) after it, if known.
        dataset: Of a stateful map-style dataset: the worker whose copy made it (0 for
            this process), and the state of that copy after it.
        made: When it was made, for the records; ``lane``: by which worker.
        size: How many samples it has.
    """

    batch: Any = None
    error: BaseException | None = None
    is_empty: bool = False
    is_end: bool = False
    has_ended: bool = False
    attempted: int = 0
    failures: Sequence[Any] = ()
    retries: int = 0
    state: Any = None
    dataset: tuple[int, Any] | None = None
    made: Made = NOT_MADE
    lane: int = 0
    size: int = 0


@dataclass(slots=True, eq=False)
class BatchTask:
    """One batch being made; owned by the stage that works on it.

    Attributes:
        number: Position in the epoch, from 0.
        indices: The sampler's indices; for a stream, the numbers of its samples.
        key: The key that generators are seeded with for its plain code, or None.
        sample_keys: If each sample has its own seed: the epoch's seed, the position of
            the first sample in the epoch, and the step to the next.
        padding: How many of its samples, the last ones, are padding.
        again: Whether it is padding as a whole: samples of the stream's beginning.
        samples: Samples so far, with ``MISSING`` where one is still being read; or the
            result of ``__getitems__``, of any type.
        stage: ``"fetch"``, ``"transform"``, ``"collate"`` or ``"pool"``.
        turn: When its first job came to the lanes of a loop, among all batches.
        result: The result, once known; late samples are dropped.
        missing: How many samples it lacks: skipped ones, or after a stream's end.
        state: As in ``BatchResult``. ``began`` to ``busy``: as in ``MadeAt``.
        spent: What ``MadeAt`` has as ``cpu`` and ``delayed``.
    """

    number: int
    indices: Sequence[Any]
    key: int | None = None
    sample_keys: tuple[int, int, int] | None = None
    padding: int = 0
    samples: Any = field(default_factory=list)
    stage: str = "fetch"
    turn: int = 0
    result: BatchResult | None = None
    missing: int = 0
    state: Any = None
    began: float = 0.0
    read: float = 0.0
    started: float = 0.0
    transformed: float = 0.0
    collated: float = 0.0
    busy: float = 0.0
    spent: RunTimes = _NOTHING
    again: bool = False

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
