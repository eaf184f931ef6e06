"""Batches made far from here: what is told of one, and what is answered, as bytes.

Common to an executor's workers and to Ray's: both get what all of them need once, then
requests, and send answers. A pickle travels as a header and its buffers.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from aioloader._order.failures import FailurePolicy
from aioloader._pipeline.recipe import Recipe
from aioloader._pipeline.run import Run
from aioloader._pipeline.work import Outcome, Work
from aioloader._transport.codec import Buffers, decode, encode, encode_by_value
from aioloader._workers.messages import Answer, sendable
from aioloader._workers.reducers import REDUCERS
from aioloader._workers.refusals import explain
from aioloader._workers.remote import RemoteError
from aioloader._workers.shipment import (
    Shipment,
    send_by_value_what_cannot_be_imported,
)
from aioloader.errors import WorkerStartError

# The header of a pickle, and its buffers in whatever form they travel.
Packed: TypeAlias = tuple[bytes, list[Any]]


def pack_shipment(shipment: Shipment) -> tuple[bytes, Buffers]:
    """Return the pickle of what every worker needs; its buffers are not copied.

    Raises:
        WorkerStartError: If it cannot be pickled; names the attribute and a way out.
    """
    try:
        send_by_value_what_cannot_be_imported()
        return encode_by_value(shipment, REDUCERS)
    except Exception as error:  # whatever a user's object raises
        raise WorkerStartError(explain(shipment, error)) from error


def recipe_of(
    shipment: Shipment,
    *,
    seed: Callable[[Work, int, int], None],
    **options: Callable[..., AbstractContextManager[None] | None],
) -> Recipe:
    """Return how a worker makes batches.

    Args:
        shipment: What it was told.
        seed: Seeds for one sample.
        options: Others of the recipe's: how it seeds.
    """
    return Recipe(
        shipment.dataset if shipment.reads else (),
        shipment.transform,
        shipment.collate_fn,
        batched=shipment.batched,
        policy=FailurePolicy(shipment.on_error),
        retry=shipment.retry,
        reads=shipment.reads,
        part=shipment.part,
        seed=seed,
        **options,  # type: ignore[arg-type]
    )


def pack_request(run: Run, work: Work, *, reads: bool) -> tuple[bytes, Buffers]:
    """Return the pickle of a request.

    Args:
        run: The iteration.
        work: The batch that is wanted.
        reads: Whether the worker reads the samples; else they go along.

    Raises:
        Exception: What the user's classes raise when they are pickled.
    """
    samples = None if reads else work.samples
    keys = work.key, work.sample_keys
    told = (run.recipe.epoch, work.number, work.indices, *keys, work.padding, samples)
    return encode(told, REDUCERS)


def open_request(recipe: Recipe, request: Packed) -> Work:
    """Return the work that was asked for; the recipe is of its epoch then."""
    recipe.epoch, *told, samples = decode(*request)
    work = Work(*told)
    if samples is not None:
        work.samples = samples
    return work


def pack_answer(
    recipe: Recipe, work: Work, outcome: Outcome, worker: int
) -> tuple[bytes, Buffers]:
    """Return the pickle of what came of ``work``, and of failures on the way.

    Args:
        recipe: Keeps the failures; they are taken.
        work: What was asked for.
        outcome: What came of it.
        worker: Number of the worker.
    """
    failures = sendable(recipe.policy.latest, worker)
    error = outcome.error and RemoteError.of(outcome.error, worker)
    answer = Answer(outcome.batch, error, outcome.is_empty, failures=failures)
    try:
        return encode(answer, REDUCERS)
    except Exception as refused:  # of the user's classes
        refused.add_note(f"aioloader: {recipe.place('send', work)}")
        remote = RemoteError.of(refused, worker)
        return encode(Answer(error=remote, failures=failures), REDUCERS)
