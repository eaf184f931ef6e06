"""The rule for errors of user code, wherever it runs.

An ``Exception`` keeps its type. An error that would silently end a loop, a generator or
a task (``StopIteration``...) becomes the cause of a ``RuntimeError``. Exits stay exits.
Only a cancellation of the task itself ends it, not one of an awaitable.
"""

import asyncio
import copy
import traceback
from typing import Any

from aioloader.errors import LoaderClosedError

# Loops, generators and tasks take these for their own end.
STOPS = (StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError)
_EXITS = (KeyboardInterrupt, SystemExit)


def raisable(error: BaseException, raiser: str) -> BaseException:
    """Return the form in which the consumer gets an error that ``raiser`` raised."""
    if isinstance(error, WrappedExit):
        return error.error
    if not isinstance(error, STOPS):
        return error
    loud = RuntimeError(f"{raiser} raised {type(error).__name__}")
    loud.__cause__ = error
    for note in getattr(error, "__notes__", ()):
        loud.add_note(note)
    return loud


def ends_task(error: BaseException) -> bool:
    """Tell whether ``error`` ends the current task; if not, user code raised it.

    A cancelled task counts its cancellations; a coroutine that is closed has no task.
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


class FailedState:
    """An error of a user's ``state_dict``, in place of the state.

    It is raised only where the state is used; a pickle keeps its text.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        text = "".join(traceback.format_exception_only(self.error)).strip()
        return FailedState, (RuntimeError(text),)


def saved_state(part: Any) -> Any:
    """Return a copy of a user object's state, or a ``FailedState``."""
    try:
        return copy.deepcopy(part.state_dict())
    except (Exception, *STOPS) as error:
        name = type(part).__name__
        error.add_note(f"aioloader: in the state_dict() of {name}")
        # No variable holds the result: its traceback has this frame.
        return FailedState(raisable(error, name))


def usable(state: Any) -> Any:
    """Return a state; raise the error if it is a ``FailedState``."""
    if isinstance(state, FailedState):
        raise state.error
    return state


class WrappedExit(Exception):  # noqa: N818  (it holds an error)
    """Carries an exit of user code out of a task: a bare one would stop the loop."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def carried(error: BaseException) -> BaseException:
    """Return ``error``, wrapped if it is an exit, to be raised in a task."""
    return WrappedExit(error) if isinstance(error, _EXITS) else error


def iterator_closed() -> LoaderClosedError:
    """Return the error of a step that was under way when its iterator was closed."""
    return LoaderClosedError("the iterator was closed; make a new one")
