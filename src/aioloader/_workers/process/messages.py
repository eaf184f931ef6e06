"""Requests and results: the messages between a loader and its worker processes.

A request is a small pickle, or a packed batch if it carries samples; a result is a head
(kind, worker, ticket, when the batch was made) and a packed batch.
"""

import pickle
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from aioloader._observe.records import NOT_MADE, Made

RESULT_HEAD = struct.Struct("<BHq8d")
STAGES = ("fetch", "transform", "collate", "send")

# The kinds of results. READY: the worker takes requests; BATCH: a batch; ANSWER: any
# other result of a request, an ``Answer``; FATAL: the ``RemoteError`` because of which
# the worker could not start; UP: the process runs, but no user code yet; LEFT: the
# ``RemoteError`` of leaving the lifespan.
READY: Final = 0
BATCH: Final = 1
ANSWER: Final = 2
FATAL: Final = 3
UP: Final = 4
LEFT: Final = 5


class Request(NamedTuple):
    """A request for one batch.

    Attributes:
        ticket: Identifies it in the pool; -1: the worker must forget ``iteration``.
        iteration: Identifies its iteration.
        epoch: Epoch number, for notes.
        number: Position in the epoch; for a replica, in the worker's own stream.
        indices: The sampler's indices.
        key: The key that generators are seeded with; None: no seeding.
        sample_keys: As in ``BatchTask``.
        padding: As in ``BatchTask``.
        samples: The samples, if the loader reads them.
        resume: For a replica whose stream is not open yet: the state to start from and
            the seeds of its earlier batches. For the successor of a worker with a copy
            of a stateful map-style dataset: a tuple of the copy's last state.
        again: As in ``BatchTask``.
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
    again: bool = False
    is_alone: bool = False

    def dump(self) -> bytes:
        """Return the frame of a request without samples."""
        return pickle.dumps(tuple(self), 5)

    @classmethod
    def load(cls, frame: bytes | memoryview) -> "Request":
        """Return the request of a frame that ``dump`` returned."""
        return cls._make(pickle.loads(frame))  # noqa: S301  (our own processes)


def result_head(
    kind: int, worker: int, ticket: int = -1, made: Made = NOT_MADE
) -> bytes:
    """Return the head of a result."""
    return RESULT_HEAD.pack(kind, worker, ticket, *made)


def forget(iteration: int) -> bytes:
    """Return the frame that makes workers forget an iteration."""
    return Request(-1, iteration, 0, 0, ()).dump()
