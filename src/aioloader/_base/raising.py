"""The rule for errors of user code, wherever it runs.

Exceptions and exits (such as Ctrl-C) keep their type. An error that would silently end
a loop, generator or task (``StopIteration``...) becomes the cause of a RuntimeError.
A task ends if it is cancelled itself, but not if an awaitable in it is cancelled.
"""

import asyncio
import copy
import traceback
from typing import Any

from aioloader.errors import LoaderClosedError

# Loops, generators and tasks end silently when they get one of these.
STOPS = (StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError)
_EXITS = (KeyboardInterrupt, SystemExit)


def raisable(error: BaseException, raiser: str) -> BaseException:
    """Return the error to raise in the consumer when ``raiser`` raised ``error``."""
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
    """Tell whether ``error`` must end the current task; if not, user code raised it.

    True if the task itself was cancelled, or if a coroutine without a task is closed.
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
    """The error that a user's ``state_dict`` raised, saved in place of the state.

    The error is raised only where the state is used. A pickle keeps only its text.
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
        # Return it directly: a variable would be in this frame, so in its traceback.
        return FailedState(raisable(error, name))


def usable(state: Any) -> Any:
    """Return ``state``, or raise its error if it is a ``FailedState``."""
    if isinstance(state, FailedState):
        raise state.error
    return state


class WrappedExit(Exception):  # noqa: N818  (it holds an error)
    """Wrapper that carries an exit out of a task; unwrapped, it would stop the loop."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def carried(error: BaseException) -> BaseException:
    """Return the error to raise in a task: ``error``, wrapped if it is an exit."""
    return WrappedExit(error) if isinstance(error, _EXITS) else error


def iterator_closed() -> LoaderClosedError:
    """Return the error for a call that runs while its iterator is closed."""
    return LoaderClosedError("the iterator was closed; make a new one")
