"""The one rule for what user code raises, wherever it runs.

An ``Exception`` keeps its type. What would silently end a loop, a generator or a task
becomes the cause of a ``RuntimeError``. Exits arrive as they are. Only a cancellation
of the task itself, and not of what it awaits, ends the task.
"""

import asyncio
import copy
import traceback
from typing import Any

# Loops, generators and tasks take these for their own end.
STOPS = (StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError)
_EXITS = (KeyboardInterrupt, SystemExit)


def raisable(error: BaseException, what: str) -> BaseException:
    """Return an error that ``what`` raised as the consumer gets it."""
    if isinstance(error, WrappedExit):
        return error.error
    if not isinstance(error, STOPS):
        return error
    loud = RuntimeError(f"{what} raised {type(error).__name__}")
    loud.__cause__ = error
    for note in getattr(error, "__notes__", ()):
        loud.add_note(note)
    return loud


def ends_task(error: BaseException) -> bool:
    """Tell whether ``error`` ends the current task, and is not an error of user code.

    A task that is cancelled has a count of its cancellations, and a coroutine that is
    closed runs in no task.
    """
    if not isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop is running
        task = None
    if isinstance(error, GeneratorExit):
        return task is None
    return task is not None and task.cancelling() > 0


class StateError:
    """What the ``state_dict`` of a user's object raised, in place of its state.

    Only those who want the state get the error; a pickle has its text.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        text = "".join(traceback.format_exception_only(self.error)).strip()
        return StateError, (RuntimeError(text),)


def saved_state(part: Any) -> Any:
    """Return a copy of the state of a user's object, or why there is none now."""
    try:
        return copy.deepcopy(part.state_dict())
    except (Exception, *STOPS) as error:
        name = type(part).__name__
        error.add_note(f"aioloader: in the state_dict() of {name}")
        return StateError(
            raisable(error, name)
        )  # no variable holds it: it has this frame


def usable(state: Any) -> Any:
    """Return a state; raise the error that is there in its place."""
    if isinstance(state, StateError):
        raise state.error
    return state


class WrappedExit(Exception):  # noqa: N818  (it holds one)
    """An exit of user code on its way out of a task, where it would stop the loop."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def carried(error: BaseException) -> BaseException:
    """Return the form of ``error`` that may be raised in a task."""
    return WrappedExit(error) if isinstance(error, _EXITS) else error
