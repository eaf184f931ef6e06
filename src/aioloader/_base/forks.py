"""Clean up what forked children inherit: locks of other threads, and descriptors.

A lock that another thread holds at a fork stays locked in the child, where that thread
does not exist. A child's copy of a socket would keep a worker from noticing that the
loader has ended. Parent and children share an open file's position. The clean-up sends
nothing and takes no lock. This module also turns the garbage collector off and on,
because a child inherits that setting.
"""

import contextlib
import gc
import importlib
import os
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# Locks and events to reset in children; all of them compare by identity.
_PRIMITIVES: "weakref.WeakSet[Any]" = weakref.WeakSet()
_CLOSERS: "list[weakref.WeakMethod[Callable[[], object]]]" = []


def fork_safe(primitive: T) -> T:
    """Return ``primitive``, a lock or event; every forked child resets it.

    An ``RLock`` that the forking thread itself holds stays locked, because the child
    runs the code that releases it.
    """
    _PRIMITIVES.add(primitive)
    return primitive


def close_in_children(close: Callable[[], object]) -> None:
    """Call ``close``, a bound method, in every child that this process forks."""
    with _CLOSERS_LOCK:
        _CLOSERS[:] = [known for known in _CLOSERS if known() is not None]
        _CLOSERS.append(weakref.WeakMethod(close))


_CLOSERS_LOCK = fork_safe(threading.RLock())
# One thread at a time: a second one would find the collector off and leave it off.
_COLLECTOR_LOCK = fork_safe(threading.RLock())
_is_importing = False


@contextlib.contextmanager
def without_collector() -> Iterator[bool]:
    """Turn the garbage collector off for a block; yield whether it was on before."""
    with _COLLECTOR_LOCK:
        is_on = gc.isenabled()
        gc.disable()
        try:
            yield is_on
        finally:
            if is_on:
                gc.enable()


def are_imported(names: tuple[str, ...]) -> bool:
    """Tell whether all modules are imported completely, not just in progress."""
    modules = map(sys.modules.get, names)
    return all(
        module and not getattr(module.__spec__, "_initializing", False)
        for module in modules
    )


def import_modules(names: tuple[str, ...]) -> None:
    """Import modules with the garbage collector off, as imported objects stay alive.

    With torch loaded, one full collection takes as long as all these imports.
    """
    global _is_importing  # noqa: PLW0603  (a process has one collector)
    if are_imported(names):
        return
    with without_collector() as is_on:
        _is_importing = is_on
        try:
            for name in names:
                importlib.import_module(name)
        finally:
            _is_importing = False


def _renew() -> None:
    if _is_importing:  # another thread was importing, which the child does not have
        gc.enable()
    # Copy the references first: another thread may have been changing the set.
    for reference in list(_PRIMITIVES.data):  # type: ignore[attr-defined]
        primitive = reference()
        is_owned = getattr(primitive, "_is_owned", bool)
        if primitive is not None and not is_owned():
            primitive._at_fork_reinit()  # noqa: SLF001  (as in threading)
    for known in _CLOSERS:
        close = known()
        if close is not None:
            close()
    _CLOSERS.clear()


with contextlib.suppress(AttributeError):  # Windows has no forks
    os.register_at_fork(after_in_child=_renew)


def reopen_files() -> None:
    """Reopen each regular file that is open only for reading, at the same position.

    Otherwise a seek in one process would move the reads of the others. Files open for
    writing, such as logs, stay shared, so that no process overwrites another's text.
    """
    try:
        numbers = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    except OSError:  # only Linux has it
        return
    import fcntl

    for number in numbers:
        with contextlib.suppress(OSError):  # such as the listing's own, now closed
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
            is_read = flags & (os.O_ACCMODE | os.O_PATH) == os.O_RDONLY
            if is_read and stat.S_ISREG(os.fstat(number).st_mode):
                position = os.lseek(number, 0, os.SEEK_CUR)
                again = os.open(f"/proc/self/fd/{number}", flags)
                os.lseek(again, position, os.SEEK_SET)
                os.dup2(again, number, inheritable=os.get_inheritable(number))
                os.close(again)
