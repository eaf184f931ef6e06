"""Words for a batch that did not come: where it is, since when, and what is stuck."""

import sys
import time
import traceback

from aioloader._pipeline.run import Run
from aioloader._pipeline.work import MISSING, Work


def awaited(run: Run, number: int) -> Work | None:
    """Return the work that is waited for: the oldest, if they come unordered."""
    works = sorted((work for work, _ in run.under_way.values()), key=_number)
    return next((work for work in works if work.number >= number), None) or next(
        iter(works), None
    )


def describe_wait(run: Run, number: int, timeout: float, waited: float) -> str:
    """Return the message of a timeout while waiting for batch ``number``.

    It may take a second to ask a worker process for its stack.
    """
    work = awaited(run, number)
    progress = "is not under way"
    if work is not None:
        number = work.number
        progress = _progress(run, work)
    queues = (
        f"queues: {len(run.under_way)} batches under way, {len(run.ready)} ready, "
        f"{run.ready.held_back()} held back for an earlier one; waited {waited:.2f} s"
    )
    text = f"DataLoader timed out after {timeout} seconds: batch {number} {progress}"
    lines = [text, queues]
    is_in_thread = work is not None and _is_in_thread(run, work)
    if is_in_thread and (stack := _thread_stack(run)):
        lines.append(f"the loader's thread is at:\n{stack}")
    return "\n".join(lines)


def _number(work: Work) -> int:
    return work.number


def _is_in_pool(run: Run, work: Work) -> bool:
    return run.pool is not None and work.step >= len(run.route)


def _is_in_thread(run: Run, work: Work) -> bool:
    if _is_in_pool(run, work):
        return False
    return run.route[max(0, work.step - 1)].place == "thread"


def _progress(run: Run, work: Work) -> str:
    if run.pool is not None and _is_in_pool(run, work):
        return run.pool.explain(work)
    step = run.route[max(0, work.step - 1)]
    since = run.under_way.get(id(work), (work, time.monotonic()))[1]
    text = f"has been in stage {step.stage!r} for {time.monotonic() - since:.2f} s"
    if step.stage != "fetch":
        return text
    missing = [
        index
        for index, sample in zip(work.indices, work.samples, strict=False)
        if sample is MISSING
    ] + list(work.indices[len(work.samples) :])
    if not missing:
        return text
    return f"{text}, {len(missing)} samples missing, first index {missing[0]!r}"


def _thread_stack(run: Run) -> str:
    """Return the Python stack of the home's thread, without our own frames below."""
    ident = run.home.cpu.ident()
    frame = sys._current_frames().get(ident) if ident else None  # noqa: SLF001  (the only way)
    return "".join(traceback.format_stack(frame)[-8:]) if frame else ""
