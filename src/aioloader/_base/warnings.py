"""Warnings that point at the user's line, however deep in the code they arise."""

import inspect
import warnings

# Packages whose frames lie between the user's line and the call of ``warn``.
_BETWEEN = {
    *("aioloader", "asyncio", "uvloop", "anyio"),
    *("concurrent", "contextlib", "threading", "weakref"),
}


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    frame, level = inspect.currentframe(), 1
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _BETWEEN:
            break
        frame, level = frame.f_back, level + 1
    # On a thread of the loader no frame is the user's: use the caller's line.
    warnings.warn(message, category, stacklevel=2 if frame is None else level)
