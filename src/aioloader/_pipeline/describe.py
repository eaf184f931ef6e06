"""Words for a batch that did not come: where it is, since when, and what is stuck."""

import sys
import time
import traceback

from aioloader._pipeline.run import Run
from aioloader._pipeline.work import MISSING, Work


def describe_wait(run: Run, number: int, timeout: float, waited: float) -> str:
    """Return the message of a timeout while waiting for batch ``number``."""
    number = min(run.under_way, default=number)  # the oldest, if they come unordered
    work, since = run.under_way.get(number, (None, 0.0))
    progress = _progress(run, work, since) if work else "is not under way"
    queues = (
        f"queues: {len(run.under_way)} batches under way, {len(run.ready)} ready, "
        f"{run.ready.held_back()} held back for an earlier one; waited {waited:.2f} s"
    )
    text = f"DataLoader timed out after {timeout} seconds: batch {number} {progress}"
    lines = [text, queues]
    stack = _thread_stack(run)
    if (
        work is not None
        and run.route[max(0, work.step - 1)].place == "thread"
        and stack
    ):
        lines.append(f"the loader's thread is at:\n{stack}")
    return "\n".join(lines)


def _progress(run: Run, work: Work, since: float) -> str:
    step = run.route[max(0, work.step - 1)]
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
