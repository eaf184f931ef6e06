"""Requests and results: the messages between a loader and its worker processes.

A request is a small pickle, or a packed batch where it carries samples; a result is a
head (kind, worker, ticket) and a packed batch.
"""

import pickle
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from aioloader._order.failures import Failure
from aioloader._pipeline.batch_task import BatchResult
from aioloader._workers.remote_error import RemoteError

RESULT_HEAD = struct.Struct("<BHq")
STAGES = ("fetch", "transform", "collate", "send")

# The kinds of results. READY: the worker takes requests; BATCH: a batch; ANSWER:
# anything else that came of a request, an ``Answer``; FATAL: a ``RemoteError``, for
# which the worker could not begin; UP: the process runs, and none of the user's code.
READY: Final = 0
BATCH: Final = 1
ANSWER: Final = 2
FATAL: Final = 3
UP: Final = 4


class Request(NamedTuple):
    """One batch to be made.

    Attributes:
        ticket: Identifies it in the pool; -1: the worker is to forget ``iteration``.
        iteration: Identifies the iteration that it belongs to.
        epoch: Epoch number, for notes.
        number: Place in the epoch; for a replica, place in the worker's own stream.
        indices: What the sampler gave.
        key: What the generators are seeded with; None: they are left alone.
        sample_keys: As in ``BatchTask``.
        padding: As in ``BatchTask``.
        samples: The samples, where the loader reads them.
        resume: For a replica: the state where its stream begins, if it is not open yet,
            and the seeds of its earlier batches. For the successor of a worker with a
            copy of a stateful map-style dataset: a tuple of the copy's last state.
        is_alone: Whether the worker must have nothing else in flight: another worker
            has died with this batch.
    """

    ticket: int
    iteration: int
    epoch: int
    number: int
    indices: Sequence[Any]
    key: int | None = None
    sample_keys: tuple[int, int, int] | None = None
    padding: int = 0
    samples: Any = None
    resume: Any = None
    is_alone: bool = False

    def dump(self) -> bytes:
        """Return the frame of a request without samples."""
        return pickle.dumps(tuple(self), 5)

    @classmethod
    def load(cls, frame: bytes | memoryview) -> "Request":
        """Return the request of a frame that ``dump`` returned."""
        return cls._make(pickle.loads(frame))  # noqa: S301  (our own processes)


def forget(iteration: int) -> bytes:
    """Return the frame by which workers forget an iteration."""
    return Request(-1, iteration, 0, 0, ()).dump()


class Answer(NamedTuple):
    """What came of a request, if it is not just a batch.

    Attributes:
        batch: The batch, if there is one.
        error: What to raise instead, a ``RemoteError``.
        is_empty: Every sample was skipped.
        is_end: The stream has ended.
        failures: Samples that failed and were skipped or replaced, as ``Failure``s
            whose error is a ``RemoteError``.
        state: The state of a replica's stream after the batch.
        dataset: As in ``BatchResult``.
    """

    batch: Any = None
    error: Any = None
    is_empty: bool = False
    is_end: bool = False
    failures: Sequence[Any] = ()
    state: Any = None
    dataset: tuple[int, Any] | None = None


def sendable(failures: deque[Failure], worker: int) -> list[Failure]:
    """Remove and return the latest failures, in a form that can be sent."""
    found = [failures.popleft() for _ in range(len(failures))]
    return [
        replace(one, error=RemoteError.of(one.error, worker))  # type: ignore[arg-type]
        for one in found
    ]


def opened(answer: Answer) -> tuple[BatchResult, list[Failure]]:
    """Return the result and the failures of an answer, as the pipeline knows them."""
    error = answer.error.raisable() if answer.error is not None else None
    failures = [
        Failure(**{**vars(one), "error": one.error.raisable()})
        for one in answer.failures
    ]
    result = BatchResult(
        answer.batch,
        error,
        answer.is_empty,
        answer.is_end,
        state=answer.state,
        dataset=answer.dataset,
    )
    return result, failures
