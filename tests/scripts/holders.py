"""Objects that a dataset may hold if workers are forked: how to make and use them."""

import contextvars
import ctypes
import io
import itertools
import logging
import mmap
import multiprocessing as mp
import multiprocessing.shared_memory
import os
import queue
import socket
import sqlite3
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import torch
from PIL import Image

Make = Callable[[ExitStack, Path], Any]
Use = Callable[[Any, int], Any]
# multiprocessing keeps the heap that its first value is allocated from.
HEAP = mp.Value("i", 0)
HOLDERS: dict[str, tuple[Make, Use]] = {}


class Holding:
    """A dataset around an object; a sample is the result of its use."""

    def __init__(self, held: Any, use: Use) -> None:
        self.held = held
        self.use = use

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.use(self.held, index)


def holder(name: str, use: Use) -> Callable[[Make], Make]:
    """Add a kind of object to the table."""

    def enter(make: Make) -> Make:
        HOLDERS[name] = (make, use)
        return make

    return enter


def simple(name: str, make: Callable[[], Any], use: Use) -> None:
    """Add an object that needs neither a folder nor a close."""
    HOLDERS[name] = (lambda _stack, _folder: make(), use)


def within(held: Any, index: int) -> int:
    """Return the index, from within a lock."""
    with held:
        return index


def one_of(held: Any, index: int) -> str:
    """Return the start of the object's string, whatever the index."""
    return str(held)[:40]


# -- locks and threads --------------------------------------------------------------

simple("Lock", threading.Lock, within)
simple("Event", threading.Event, lambda held, index: held.is_set())


@holder("threading.local", lambda held, index: held.value + index)
def make_local(stack: ExitStack, folder: Path) -> Any:
    held = threading.local()
    held.value = 5
    return held


@holder("queue.Queue", lambda held, index: held.queue[index % 2] + held.qsize())
def make_queue(stack: ExitStack, folder: Path) -> Any:
    held: queue.Queue[int] = queue.Queue()
    held.put(3)
    held.put(4)
    return held


@holder("ThreadPoolExecutor", lambda held, index: held.submit(abs, -index).result())
def make_executor(stack: ExitStack, folder: Path) -> Any:
    return stack.enter_context(ThreadPoolExecutor(1))  # its threads start when used


@holder("ContextVar", lambda held, index: held.get())
def make_variable(stack: ExitStack, folder: Path) -> Any:
    held: contextvars.ContextVar[int] = contextvars.ContextVar("held", default=1)
    held.set(8)
    return held


# -- files and sockets --------------------------------------------------------------


# Both workers share a file's position, so none of these moves it.


@holder("binary file", lambda held, index: os.pread(held.fileno(), 1, index))
def make_binary(stack: ExitStack, folder: Path) -> Any:
    (folder / "binary").write_bytes(b"abcdefghi")
    return stack.enter_context((folder / "binary").open("rb", buffering=0))


@holder("mmap", lambda held, index: held[index])
def make_mmap(stack: ExitStack, folder: Path) -> Any:
    (folder / "mapped").write_bytes(b"abcdefghi")
    file = stack.enter_context((folder / "mapped").open("r+b"))
    return stack.enter_context(mmap.mmap(file.fileno(), 0))


@holder("np.memmap", lambda held, index: held[index])
def make_memmap(stack: ExitStack, folder: Path) -> Any:
    held = np.memmap(folder / "rows", np.int64, "w+", shape=(6, 2))
    held[:] = np.arange(12).reshape(6, 2)
    return held


@holder("socket", lambda held, index: held[0].getsockopt(1, 3) + held[1].family)
def make_socket(stack: ExitStack, folder: Path) -> Any:
    return [stack.enter_context(end) for end in socket.socketpair()]


@holder("h5py.File", lambda held, index: held["rows"][index])
def make_hdf5(stack: ExitStack, folder: Path) -> Any:
    with h5py.File(folder / "a.h5", "w") as written:
        written["rows"] = np.arange(12).reshape(6, 2)
    return stack.enter_context(h5py.File(folder / "a.h5"))


@holder("lazy picture", lambda held, index: held.copy().getpixel((index, 0))[0])
def make_picture(stack: ExitStack, folder: Path) -> Any:
    pixels = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(4, 6, 3)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return stack.enter_context(Image.open(content))


@holder(
    "sqlite3 connection",
    lambda held, index: held.execute(
        "SELECT x FROM t WHERE x = ?", (index,)
    ).fetchone(),
)
def make_database(stack: ExitStack, folder: Path) -> Any:
    held = sqlite3.connect(folder / "a.db")
    stack.callback(held.close)
    with held:
        held.execute("CREATE TABLE t (x INTEGER)")
        held.executemany("INSERT INTO t VALUES (?)", [(k,) for k in range(6)])
    return held


@holder("logger with handler", lambda held, index: (held.warning(index), index)[1])
def make_logger(stack: ExitStack, folder: Path) -> Any:
    held = logging.Logger("held")  # noqa: LOG001  (not a shared one)
    handler = logging.FileHandler(folder / "log")
    stack.callback(handler.close)
    held.addHandler(handler)
    return held


@holder("Popen", lambda held, index: held.args[-1])
def make_process(stack: ExitStack, folder: Path) -> Any:
    return stack.enter_context(
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    )


# -- objects that multiprocessing shares --------------------------------------------

simple("mp.Lock", mp.Lock, within)
simple("mp.Value", lambda: mp.Value("i", 7), lambda held, index: held.value + index)


@holder("mp.Queue", lambda held, index: held.put(index) or index)
def make_shared_queue(stack: ExitStack, folder: Path) -> Any:
    held: Any = mp.Queue()
    stack.callback(held.join_thread)
    stack.callback(held.close)
    return held


@holder("mp.Pipe", lambda held, index: [end.fileno() > 2 for end in held])
def make_pipe(stack: ExitStack, folder: Path) -> Any:
    return [stack.enter_context(end) for end in mp.Pipe()]


@holder("manager's proxies", lambda held, index: held[0]["scale"] * held[1][index])
def make_proxies(stack: ExitStack, folder: Path) -> Any:
    manager = stack.enter_context(mp.Manager())
    return manager.dict(scale=2), manager.list(range(6)), manager.Lock()


@holder("shared_memory", lambda held, index: held.buf[index])
def make_memory(stack: ExitStack, folder: Path) -> Any:
    held = multiprocessing.shared_memory.SharedMemory(create=True, size=64)
    stack.callback(held.unlink)
    stack.callback(held.close)
    assert held.buf is not None
    held.buf[:6] = bytes(range(6))
    return held


simple(
    "share_memory_()",
    lambda: torch.arange(6).share_memory_(),  # type: ignore[no-untyped-call]
    lambda held, index: held[index],
)

# -- functions and classes ----------------------------------------------------------


def begun() -> Any:
    """Return a generator that has started."""

    def counting() -> Any:
        yield from itertools.count(1)

    held = counting()
    next(held)
    return held


simple("lambda", lambda: lambda x: x + 1, lambda held, index: held(index))
simple("generator", begun, lambda held, index: next(held) > 1)
simple("frame", sys._getframe, lambda held, index: held.f_code.co_name)


@holder("instance of a local class", lambda held, index: held.double(index))
def make_instance(stack: ExitStack, folder: Path) -> Any:
    class Local:
        __slots__ = ()

        def double(self, x: int) -> int:
            return 2 * x

    return Local()


@holder("WeakValueDictionary", lambda held, index: held[0]["one"].held)
def make_weak(stack: ExitStack, folder: Path) -> Any:
    value = Holding(index_of, index_of)
    value.held = 4
    return weakref.WeakValueDictionary({"one": value}), value


def index_of(_held: Any, index: int) -> int:
    return index


# -- data ---------------------------------------------------------------------------

simple(
    "ctypes pointer",
    lambda: ctypes.pointer(ctypes.c_int(9)),
    lambda held, index: held.contents.value,
)
simple(
    "pandas frame",
    lambda: pd.DataFrame({"a": range(6), "b": list("uvwxyz")}),
    lambda held, index: held.loc[index, "b"],
)


@holder("torch.Generator", lambda held, index: held.initial_seed())
def make_generator(stack: ExitStack, folder: Path) -> Any:
    return torch.Generator().manual_seed(4)


@holder("torch's loader, iterated", lambda held, index: held[0].batch_size + index)
def make_loader(stack: ExitStack, folder: Path) -> Any:
    loader: Any = torch.utils.data.DataLoader(range(4), 2)  # type: ignore[arg-type]
    iterator = iter(loader)
    next(iterator)
    return loader, iterator
