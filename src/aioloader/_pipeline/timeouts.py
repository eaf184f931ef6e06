"""The message for a batch that timed out: where it is, since when, what is stuck."""

import time

from aioloader._order.retry import last_error
from aioloader._pipeline.batch_task import MISSING, BatchTask
from aioloader._pipeline.cpu import stack_of
from aioloader._pipeline.pipeline import Pipeline
from aioloader.protocols import Kind


def awaited(pipeline: Pipeline, number: int) -> BatchTask | None:
    """Return the awaited task: the oldest one if batches come unordered."""
    tasks = sorted((task for task, _ in list(pipeline.under_way.values())), key=_number)
    return next((task for task in tasks if task.number >= number), None) or next(
        iter(tasks), None
    )


def describe_wait(
    pipeline: Pipeline, number: int, timeout: float, waited: float
) -> str:
    """Return the message of a timeout while waiting for batch ``number``.

    Asking a worker process for its stack may take a second.
    """
    task = awaited(pipeline, number)
    progress = "is not under way"
    if task is not None:
        number = task.number
        progress = _progress(pipeline, task)
    queues = (
        f"queues: {len(pipeline.under_way)} batches under way, "
        f"{len(pipeline.ready)} ready, {pipeline.ready.held_back()} held back for an "
        f"earlier one; waited {waited:.2f} s"
    )
    text = f"DataLoader timed out after {timeout} seconds: batch {number} {progress}"
    lines = [text, queues]
    is_in_thread = task is not None and _is_in_thread(pipeline, task)
    if is_in_thread and (stack := stack_of(pipeline.host.cpu.ident())):
        lines.append(f"the loader's thread is at:\n{stack}")
    return "\n".join(filter(None, [*lines, last_error()]))


def _number(task: BatchTask) -> int:
    return task.number


def _is_in_pool(pipeline: Pipeline, task: BatchTask) -> bool:
    return pipeline.pool is not None and task.stage == "pool"


def _is_in_thread(pipeline: Pipeline, task: BatchTask) -> bool:
    if _is_in_pool(pipeline, task):
        return False
    maker = pipeline.maker
    is_on_loop = {
        "fetch": maker.reads_async or maker.kind is Kind.ASYNC_ITERABLE,
        "transform": maker.transforms_async,
        "collate": maker.collates_async,
    }
    return not is_on_loop.get(task.stage, False)


def _progress(pipeline: Pipeline, task: BatchTask) -> str:
    if pipeline.pool is not None and _is_in_pool(pipeline, task):
        return pipeline.pool.explain(task)
    since = pipeline.under_way.get(id(task), (task, time.monotonic()))[1]
    text = f"has been in stage {task.stage!r} for {time.monotonic() - since:.2f} s"
    if task.stage != "fetch":
        return text
    missing = [
        index
        for index, sample in zip(task.indices, task.samples, strict=False)
        if sample is MISSING
    ] + list(task.indices[len(task.samples) :])
    if not missing:
        return text
    return f"{text}, {len(missing)} samples missing, first index {missing[0]!r}"
