"""Warnings that point at the user's line, however deep they are issued."""

import inspect
import warnings

# What runs between the user's line and where a warning is issued.
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
    # On our threads there is no user's line: use the caller's.
    warnings.warn(message, category, stacklevel=2 if frame is None else level)
