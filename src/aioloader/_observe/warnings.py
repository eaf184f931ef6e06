"""Warnings point at the user's line that led to them, however deep they are found."""

import inspect
import warnings

# What runs between the user's line and where a warning is issued.
_BETWEEN = {
    *("aioloader", "asyncio", "uvloop", "anyio"),
    *("concurrent", "contextlib", "threading", "weakref"),
}


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning.

    Args:
        message: What, and what to do.
        category: Of the warning.
    """
    frame, level = inspect.currentframe(), 1
    while frame is not None and _package_of(frame.f_globals) in _BETWEEN:
        frame, level = frame.f_back, level + 1
    # On a thread of ours there is no line of the user's: then it is the caller's.
    warnings.warn(message, category, stacklevel=2 if frame is None else level)


def _package_of(names: dict[str, object]) -> str:
    return str(names.get("__name__")).partition(".")[0]
