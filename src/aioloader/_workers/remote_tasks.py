"""Batches made by an executor's workers or by Ray's: requests and answers as bytes.

Each worker gets the ``WorkerSpec`` once, then requests, and sends answers. A pickle
travels as a header and its buffers.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from aioloader._order.failures import FailurePolicy
from aioloader._pipeline.batch_maker import BatchMaker
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.pipeline import Pipeline
from aioloader._transport.codec import Buffers, decode, encode, encode_by_value
from aioloader._workers.pickling_errors import explain
from aioloader._workers.process.messages import Answer, sendable
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
        WorkerStartError: If it cannot be pickled; names the attribute and a way out.
    """
    try:
        send_by_value_what_cannot_be_imported()
        return encode_by_value(spec, REDUCERS)
    except Exception as error:  # whatever a user's object raises
        raise WorkerStartError(explain(spec, error)) from error


def maker_of(
    spec: WorkerSpec,
    *,
    seed: Callable[[BatchTask, int, int], None],
    **options: Callable[..., AbstractContextManager[None] | None],
) -> BatchMaker:
    """Return how a worker makes batches.

    Args:
        spec: What it does.
        seed: Seeds for one sample.
        options: Others of the maker's: how it seeds.
    """
    return BatchMaker(
        spec.dataset if spec.reads else (),
        spec.transform,
        spec.collate_fn,
        batched=spec.batched,
        policy=FailurePolicy(spec.on_error),
        retry=spec.retry,
        reads=spec.reads,
        part=spec.part,
        seed=seed,
        **options,  # type: ignore[arg-type]
    )


def pack_request(
    pipeline: Pipeline, task: BatchTask, *, reads: bool
) -> tuple[bytes, Buffers]:
    """Return the pickle of a request.

    Args:
        pipeline: The iteration.
        task: The batch.
        reads: Whether the worker reads the samples; else they go along.

    Raises:
        Exception: What the user's classes raise when they are pickled.
    """
    samples = None if reads else task.samples
    keys = task.key, task.sample_keys
    place = pipeline.maker.epoch, task.number
    return encode((*place, task.indices, *keys, task.padding, samples), REDUCERS)


def open_request(maker: BatchMaker, request: Packed) -> BatchTask:
    """Return the task of a request, and set the maker to its epoch."""
    maker.epoch, *fields, samples = decode(*request)
    task = BatchTask(*fields)
    if samples is not None:
        task.samples = samples
    return task


def pack_answer(
    maker: BatchMaker, task: BatchTask, result: BatchResult, worker: int
) -> tuple[bytes, Buffers]:
    """Return the pickle of a result, and of the failures on the way to it.

    Args:
        maker: Its latest failures are removed.
        task: The batch.
        result: Its result.
        worker: Number of the worker.
    """
    failures = sendable(maker.policy.latest, worker)
    error = result.error and RemoteError.of(result.error, worker)
    answer = Answer(result.batch, error, result.is_empty, failures=failures)
    try:
        return encode(answer, REDUCERS)
    except Exception as refused:  # of the user's classes
        refused.add_note(f"aioloader: {maker.place('send', task)}")
        remote = RemoteError.of(refused, worker)
        return encode(Answer(error=remote, failures=failures), REDUCERS)
