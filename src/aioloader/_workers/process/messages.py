"""The words that a loader and its workers exchange.

A request is a small pickle, or a parcel where it carries samples; a result is a head
(kind, worker, ticket) and a parcel.
"""

import pickle
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, NamedTuple

from aioloader._order.failures import Failure
from aioloader._pipeline.batch_task import BatchResult
from aioloader._workers.remote_error import RemoteError

RESULT_HEAD = struct.Struct("<BHq")
STAGES = ("fetch", "transform", "collate", "send")


class Kind(IntEnum):
    """What a result holds."""

    READY = 0  # the worker has begun to serve
    BATCH = 1  # a batch
    OUTCOME = 2  # anything else: an ``Answer``
    FATAL = 3  # a RemoteError: the worker could not begin
    UP = 4  # the process of the worker runs, and none of the user's code yet


class Request(NamedTuple):
    """One batch to be made.

    Attributes:
        ticket: Names it for the pool, unlike any other; -1 only forgets ``run``.
        run: Which iteration it is of.
        epoch: Epoch number, for notes.
        number: Place in the epoch; for a replica, place in the worker's own stream.
        key: What the generators are seeded with; None: they are left alone.
        sample_keys: As in ``BatchTask``.
        padding: As in ``BatchTask``.
        resume: Of a replica: where its stream begins, if it is not open yet, and with
            what its earlier batches were seeded. Of a worker that died, and had a copy
            of a stateful map-style dataset: a tuple of the state that this was in. Or
            None.
        is_alone: Whether it has cost a worker its life, and must not share one.
        indices: What the sampler gave.
        samples: What was read already, where the loader reads.
    """

    ticket: int
    run: int
    epoch: int
    number: int
    key: int | None
    sample_keys: tuple[int, int, int] | None
    is_alone: bool
    indices: Sequence[Any]
    samples: Any = None
    padding: int = 0
    resume: Any = None

    def dump(self) -> bytes:
        """Return the frame of a request without samples."""
        return pickle.dumps(tuple(self), 5)

    @classmethod
    def load(cls, frame: bytes) -> "Request":
        """Return what ``dump`` was called on."""
        return cls._make(pickle.loads(frame))  # noqa: S301  (our own processes)


class Answer(NamedTuple):
    """What came of a request, if it is not just a batch.

    Attributes:
        batch: The batch, if there is one.
        error: What to raise instead, a ``RemoteError``.
        is_empty: Every sample was skipped.
        is_end: The stream has ended.
        failures: Samples that failed and were skipped or replaced, as ``Failure``s
            whose error is a ``RemoteError``.
        state: What a replica's stream was left in behind it.
        dataset: As in ``BatchResult``.
    """

    batch: Any = None
    error: Any = None
    is_empty: bool = False
    is_end: bool = False
    failures: Sequence[Any] = ()
    state: Any = None
    dataset: tuple[int, Any] | None = None


FORGET = Request(-1, 0, 0, 0, None, None, False, ())  # noqa: FBT003  (fields, in order)


def sendable(failures: deque[Failure], worker: int) -> list[Failure]:
    """Take failures from those that are latest, in a form that can be sent."""
    found = [failures.popleft() for _ in range(len(failures))]
    return [
        replace(one, error=RemoteError.of(one.error, worker))  # type: ignore[arg-type]
        for one in found
    ]


def opened(answer: Answer) -> tuple[BatchResult, list[Failure]]:
    """Return an answer as the pipeline knows it."""
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
