"""Batches made in another process: the requests, and the answers.

Workers of executors and of Ray get the ``WorkerSpec`` once, then requests, both pickled
to a header and its buffers.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from aioloader._observe.records import NOT_MADE, Made
from aioloader._order.failures import Failure, FailurePolicy
from aioloader._pipeline.batch_maker import BatchMaker
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.pipeline import Pipeline
from aioloader._transport.codec import Buffers, decode, encode
from aioloader._transport.slots import MIN_BYTES, Lender
from aioloader._workers.reducers import REDUCERS
from aioloader._workers.remote_error import RemoteError
from aioloader._workers.worker_spec import WorkerSpec
from aioloader.errors import WorkerError

# The header of a pickle, and its buffers in whatever form they travel.
Packed: TypeAlias = tuple[bytes, list[Any]]


def maker_of(spec: WorkerSpec, **options: Any) -> BatchMaker:
    """Return the batch maker of a worker; ``options`` say how it seeds, and where."""
    return BatchMaker(**spec.given(), policy=FailurePolicy(spec.on_error), **options)


def pack_request(
    pipeline: Pipeline, task: BatchTask, *, reads: bool
) -> tuple[bytes, Buffers]:
    """Return the pickle of a request; with the samples, unless the worker reads them.

    Raises:
        Exception: What the user's classes raise when pickled.
    """
    samples = None if reads else task.samples
    keys = task.key, task.sample_keys
    place = pipeline.maker.epoch, task.number
    return encode((*place, task.indices, *keys, task.padding, samples), REDUCERS)


def open_request(maker: BatchMaker, request: Packed) -> BatchTask:
    """Return the task of a request; set the maker to its epoch."""
    maker.epoch, *fields, samples = decode(*copied(request, maker.pool))
    task = BatchTask(*fields)
    if samples is not None:
        task.samples = samples
    return task


def copied(packed: Packed, lender: Lender) -> Packed:
    """Return a pickle with its buffers in writable memory; ``lender`` lends it."""
    return packed[0], [_copied(buffer, lender) for buffer in packed[1]]


def _copied(buffer: Any, lender: Lender) -> Any:
    raw = memoryview(buffer).cast("B")
    if raw.nbytes < MIN_BYTES:
        return bytearray(raw)
    memory = lender.lease(raw.nbytes)
    memory[:] = np.frombuffer(raw, np.uint8)
    return memoryview(memory)  # a numpy view would not keep its owner alive


def of_both(task: BatchTask, made: Sequence[float]) -> Made:
    """Return when a batch was made, combining reads here with a worker's times."""
    began, read, started, transformed, collated, busy, *spent = made
    if not began:
        began, read, busy = task.began, task.read, task.busy
        started = task.started or started
    return began, read, started, transformed, collated, busy, spent[0], spent[1]


class Answer(NamedTuple):
    """The result of a request, if it is not just a batch.

    The fields are those of ``BatchResult``, and ``missing`` of ``BatchTask``.

    Attributes:
        error: The ``RemoteError`` to raise.
        failures: ``Failure``s whose error is a ``RemoteError``.
        made: When it was made, if the pool does not send it separately.
    """

    batch: Any = None
    error: Any = None
    is_empty: bool = False
    is_end: bool = False
    failures: Sequence[Any] = ()
    retries: int = 0
    state: Any = None
    dataset: tuple[int, Any] | None = None
    made: Made = NOT_MADE
    lane: int = 0
    missing: int = 0


def pack_answer(
    maker: BatchMaker, task: BatchTask, result: BatchResult, worker: int
) -> tuple[bytes, Buffers]:
    """Return the pickle of a result, and of the samples that failed since the last."""
    failures = sendable(maker.policy.latest, worker)
    answer = Answer(
        result.batch,
        result.error and RemoteError.of(result.error, worker),
        result.is_empty,
        missing=task.missing,
        failures=failures,
        retries=maker.policy.take_retries(),
        made=task.made(),
        lane=max(0, worker),
    )
    try:
        return encode(answer, REDUCERS)
    except Exception as refused:  # of the user's classes
        refused.add_note(f"aioloader: {maker.place('send', task)}")
        remote = RemoteError.of(refused, worker)
        return encode(Answer(error=remote, failures=failures), REDUCERS)


def sendable(failures: deque[Failure], worker: int) -> list[Failure]:
    """Remove and return the latest failures, in a picklable form."""
    found = [failures.popleft() for _ in range(len(failures))]
    return [
        replace(one, error=RemoteError.of(one.error, worker))  # type: ignore[arg-type]
        for one in found
    ]


def deliver(pipeline: Pipeline, task: BatchTask, packed: Packed, worker: int) -> None:
    """Deliver the answer of a worker to its pipeline."""
    try:
        answer = decode(*copied(packed, pipeline.maker.pool))
    except Exception as error:  # of a user's class
        text = f"a batch of worker {worker} could not be unpickled: {error!r}"
        problem = WorkerError(text, worker=worker)
        problem.__cause__ = error
        pipeline.receive(task, BatchResult(error=problem))
    else:
        task.samples = []
        pipeline.receive(task, *opened(answer, task))


def opened(answer: Answer, task: BatchTask) -> tuple[BatchResult, list[Failure]]:
    """Return the pipeline's form of an answer: the result and the failures."""
    task.missing += answer.missing
    failures = [replace(one, error=one.error.raisable()) for one in answer.failures]
    result = BatchResult(
        answer.batch,
        answer.error and answer.error.raisable(),
        answer.is_empty,
        answer.is_end,
        retries=answer.retries,
        state=answer.state,
        dataset=answer.dataset,
        made=of_both(task, answer.made),
        lane=answer.lane,
    )
    return result, failures
