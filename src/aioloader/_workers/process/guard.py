"""A process that forks by itself: its children must not hold the loader's descriptors.

A copy of a socket in a forked child would keep workers alive that should see its end.
Nothing is told to anybody, and no lock is taken: another thread may have held it.
"""

import os
import weakref
from collections.abc import Callable

_CLOSERS: "list[weakref.WeakMethod[Callable[[], object]]]" = []
_REGISTERED: list[bool] = []


def close_in_children(close: Callable[[], object]) -> None:
    """Call ``close``, a bound method, in every child that this process forks."""
    _CLOSERS[:] = [known for known in _CLOSERS if known() is not None]
    _CLOSERS.append(weakref.WeakMethod(close))
    if not _REGISTERED:
        _REGISTERED.append(True)
        os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for known in _CLOSERS:
        close = known()
        if close is not None:
            close()
    _CLOSERS.clear()
