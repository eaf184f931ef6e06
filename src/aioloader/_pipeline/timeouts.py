"""Words for a batch that did not come: where it is, since when, and what is stuck."""

import sys
import time
import traceback

from aioloader._pipeline.batch_task import MISSING, BatchTask
from aioloader._pipeline.pipeline import Pipeline


def awaited(run: Pipeline, number: int) -> BatchTask | None:
    """Return the task that is waited for: the oldest, if they come unordered."""
    tasks = sorted((task for task, _ in run.under_way.values()), key=_number)
    return next((task for task in tasks if task.number >= number), None) or next(
        iter(tasks), None
    )


def describe_wait(run: Pipeline, number: int, timeout: float, waited: float) -> str:
    """Return the message of a timeout while waiting for batch ``number``.

    It may take a second to ask a worker process for its stack.
    """
    task = awaited(run, number)
    progress = "is not under way"
    if task is not None:
        number = task.number
        progress = _progress(run, task)
    queues = (
        f"queues: {len(run.under_way)} batches under way, {len(run.ready)} ready, "
        f"{run.ready.held_back()} held back for an earlier one; waited {waited:.2f} s"
    )
    text = f"DataLoader timed out after {timeout} seconds: batch {number} {progress}"
    lines = [text, queues]
    is_in_thread = task is not None and _is_in_thread(run, task)
    if is_in_thread and (stack := _thread_stack(run)):
        lines.append(f"the loader's thread is at:\n{stack}")
    return "\n".join(lines)


def _number(task: BatchTask) -> int:
    return task.number


def _is_in_pool(run: Pipeline, task: BatchTask) -> bool:
    return run.pool is not None and task.step >= len(run.route)


def _is_in_thread(run: Pipeline, task: BatchTask) -> bool:
    if _is_in_pool(run, task):
        return False
    return run.route[max(0, task.step - 1)].place == "thread"


def _progress(run: Pipeline, task: BatchTask) -> str:
    if run.pool is not None and _is_in_pool(run, task):
        return run.pool.explain(task)
    step = run.route[max(0, task.step - 1)]
    since = run.under_way.get(id(task), (task, time.monotonic()))[1]
    text = f"has been in stage {step.stage!r} for {time.monotonic() - since:.2f} s"
    if step.stage != "fetch":
        return text
    missing = [
        index
        for index, sample in zip(task.indices, task.samples, strict=False)
        if sample is MISSING
    ] + list(task.indices[len(task.samples) :])
    if not missing:
        return text
    return f"{text}, {len(missing)} samples missing, first index {missing[0]!r}"


def _thread_stack(run: Pipeline) -> str:
    """Return the Python stack of the host's thread, without our own frames below."""
    ident = run.host.cpu.ident()
    frame = sys._current_frames().get(ident) if ident else None  # noqa: SLF001  (the only way)
    return "".join(traceback.format_stack(frame)[-8:]) if frame else ""
