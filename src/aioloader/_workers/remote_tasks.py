"""Batches made in another process: how a worker makes them, and its answers.

This also has the requests to workers of executors and of Ray: the ``WorkerSpec`` once,
then requests, both pickled to a header and its buffers.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from aioloader._observe.records import NOT_MADE, Made
from aioloader._order.failures import Failure, FailurePolicy
from aioloader._pipeline.batch_maker import BatchMaker
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.pipeline import Pipeline
from aioloader._transport.codec import Buffers, decode, encode, encode_by_value
from aioloader._workers.reducers import REDUCERS
from aioloader._workers.remote_error import RemoteError
from aioloader._workers.worker_spec import (
    WorkerSpec,
    send_by_value_what_cannot_be_imported,
)
from aioloader.errors import WorkerStartError

# The header of a pickle, and its buffers in whatever form they travel.
Packed: TypeAlias = tuple[bytes, list[Any]]


def pack_spec(spec: WorkerSpec) -> tuple[bytes, Buffers]:
    """Return the pickle of ``spec``; its buffers are not copied.

    Raises:
        WorkerStartError: If it cannot be pickled; names the attribute and a remedy.
    """
    try:
        send_by_value_what_cannot_be_imported()
        return encode_by_value(spec, REDUCERS)
    except Exception as error:  # user objects may raise anything
        from aioloader._workers.pickling_errors import explain

        raise WorkerStartError(explain(spec, error)) from error


def maker_of(spec: WorkerSpec, **options: Any) -> BatchMaker:
    """Return the batch maker of a worker.

    Args:
        spec: What the worker does.
        options: Further options of the maker: seeding, and memory for batches.
    """
    return BatchMaker(**spec.given(), policy=FailurePolicy(spec.on_error), **options)


def pack_request(
    pipeline: Pipeline, task: BatchTask, *, reads: bool
) -> tuple[bytes, Buffers]:
    """Return the pickle of a request.

    Args:
        pipeline: The iteration.
        task: The batch.
        reads: Whether the worker reads the samples; otherwise they are sent along.

    Raises:
        Exception: What the user's classes raise when pickled.
    """
    samples = None if reads else task.samples
    keys = task.key, task.sample_keys
    place = pipeline.maker.epoch, task.number
    return encode((*place, task.indices, *keys, task.padding, samples), REDUCERS)


def open_request(maker: BatchMaker, request: Packed) -> BatchTask:
    """Return the task of a request; set the maker to its epoch."""
    maker.epoch, *fields, samples = decode(*request)
    task = BatchTask(*fields)
    if samples is not None:
        task.samples = samples
    return task


def of_both(task: BatchTask, made: Sequence[float]) -> Made:
    """Return when a batch was made, combining reads here with a worker's times."""
    began, read, started, transformed, collated, busy, *spent = made
    if not began:
        began, read, busy = task.began, task.read, task.busy
        started = task.started or started
    return began, read, started, transformed, collated, busy, spent[0], spent[1]


def pack_answer(
    maker: BatchMaker, task: BatchTask, result: BatchResult, worker: int
) -> tuple[bytes, Buffers]:
    """Return the pickle of a result and of the samples that failed.

    Args:
        maker: The maker, whose latest failures are removed.
        task: The batch.
        result: Its result.
        worker: Number of the worker.
    """
    failures = sendable(maker.policy.latest, worker)
    error = result.error and RemoteError.of(result.error, worker)
    answer = Answer(
        result.batch,
        error,
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


class Answer(NamedTuple):
    """The result of a request, if it is not just a batch.

    Attributes:
        batch: The batch, if there is one.
        error: The ``RemoteError`` to raise instead.
        is_empty: Every sample was skipped.
        is_end: The stream has ended.
        failures: Samples that failed and were skipped or replaced, as ``Failure``s
            whose error is a ``RemoteError``.
        retries: As in ``BatchResult``.
        state: The state of a replica's stream after the batch.
        dataset: As in ``BatchResult``.
        made: As in ``BatchResult``, if the pool does not send it separately.
        lane: As in ``BatchResult``.
        missing: As in ``BatchTask``, if not known to the loader.
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


def sendable(failures: deque[Failure], worker: int) -> list[Failure]:
    """Remove and return the latest failures, in a picklable form."""
    found = [failures.popleft() for _ in range(len(failures))]
    return [
        replace(one, error=RemoteError.of(one.error, worker))  # type: ignore[arg-type]
        for one in found
    ]


def opened(answer: Answer, task: BatchTask) -> tuple[BatchResult, list[Failure]]:
    """Return the pipeline's form of an answer: the result and the failures."""
    task.missing += answer.missing
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
        retries=answer.retries,
        state=answer.state,
        dataset=answer.dataset,
        made=of_both(task, answer.made),
        lane=answer.lane,
    )
    return result, failures
