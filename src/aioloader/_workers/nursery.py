"""The nursery: forked from the template for one loader, the parent of its workers.

It unpickles what the loader shipped, once, and forks the workers from there, so that
they share it as far as Python allows. It tells the loader of births and deaths, and
sees to the end: asked first, then terminated, then killed.
"""

import contextlib
import gc
import os
import pickle
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aioloader._transport.channel import Channel
from aioloader._workers import child
from aioloader._workers.desk import Ends, send_fatal
from aioloader._workers.remote import RemoteError
from aioloader._workers.shipment import Shipment, Surroundings, receive

# Seconds for workers to end by themselves, and then after SIGTERM.
ASKED = 3.0
TERMINATED = 1.0
# By this name a nursery with an order is known from one that waits for it.
NAME = b"aioloader-nurse"
# The exit status of a worker whose nursery died with it.
UNKNOWN = -1000


@dataclass(frozen=True)
class Order:
    """What a nursery is told at its birth.

    Attributes:
        surroundings: Of the loader's process.
        is_shared: Whether to unpickle here, for all workers; else each does by itself.
    """

    surroundings: Surroundings
    is_shared: bool


@dataclass(frozen=True)
class Note:
    """What a nursery tells the loader.

    Attributes:
        word: ``"born"`` (worker, pid), ``"died"`` (worker, exit status), ``"threads"``
            (it cannot fork: unpickling has started threads) or ``"failed"`` (error).
    """

    word: str
    worker: int = -1
    number: int = 0
    error: RemoteError | None = None


def run(order: bytes, descriptors: list[int]) -> None:
    """Be a nursery; never return.

    Args:
        order: What to do: an ``Order``, pickled.
        descriptors: The socket to the loader, the shipment, and what ``Ends`` lists up
            to ``stacks``, then ``samples`` (absent where there is none).
    """
    child.name_process(NAME)
    try:
        _Nursery(pickle.loads(order), descriptors).live()  # noqa: S301  (the loader)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


class _Nursery:
    def __init__(self, order: Order, descriptors: list[int]) -> None:
        self._order = order
        control, self._file, *self._common = descriptors
        self._control = Channel.adopt(control)
        self._shipment: Shipment | None = None
        self._workers: dict[int, tuple[int, int]] = {}  # pidfd -> worker, pid

    def live(self) -> None:
        """Fork workers as told, until the loader is gone."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if not self._prepare():
            return
        while True:
            poll = select.poll()
            for descriptor in (self._control.fileno(), *self._workers):
                poll.register(descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll()}
            for pidfd in ready & set(self._workers):
                self._reap(pidfd)
            if self._control.fileno() in ready and not self._listen():
                return

    def _prepare(self) -> bool:
        """Enter the surroundings and unpickle; tell whether workers can be forked."""
        try:
            self._order.surroundings.enter()
            if self._order.is_shared:
                self._shipment = receive(self._file)
        except BaseException as error:
            self._tell(Note("failed", error=RemoteError.of(error, 0)))
            return False
        if number_of_threads() > 1:
            self._tell(Note("threads"))
            return False
        gc.freeze()  # a collection in a worker would touch, and so copy, every page
        return True

    def _listen(self) -> bool:
        """Follow one instruction; tell whether there may be more."""
        try:
            received = self._control.receive()
        except EOFError:
            # Nobody is left to serve: without this process the kernel kills them.
            self._signal_all(signal.SIGKILL)
            return False
        assert received is not None
        word, worker = pickle.loads(received[0])  # noqa: S301  (the loader)
        if word == "start":
            self._start(worker, received[1])
        elif word == "kill":
            self._kill(worker)
        else:
            self._end()
            return False
        return True

    def _start(self, worker: int, descriptors: list[int]) -> None:
        arena, *own = descriptors
        requests, results, board, stacks, *samples = self._common
        ends = Ends(
            requests=requests,
            own=own[0] if own else -1,
            results=results,
            board=board,
            stacks=stacks,
            arena=arena,
            samples=samples[0] if samples else -1,
        )
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be_worker(worker, ends, parent)
        self._workers[os.pidfd_open(pid)] = worker, pid
        for descriptor in descriptors:
            os.close(descriptor)
        self._tell(Note("born", worker, pid))

    def _be_worker(self, worker: int, ends: Ends, parent: int) -> None:
        self._control.close()
        for pidfd in self._workers:
            os.close(pidfd)
        gc.enable()
        try:
            shipment = self._shipment or receive(self._file)
        except BaseException as error:
            send_fatal(worker, ends, error)
            os._exit(1)
        os.close(self._file)
        child.run(worker, ends, shipment, self._order.surroundings, parent=parent)

    def _reap(self, pidfd: int) -> None:
        worker, pid = self._workers.pop(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._tell(Note("died", worker, os.waitstatus_to_exitcode(status)))

    def _kill(self, worker: int) -> None:
        for number, pid in self._workers.values():
            if number == worker:
                os.kill(pid, signal.SIGKILL)

    def _end(self) -> None:
        """Let the workers end: they were asked already, for their requests are over."""
        self._await_all(ASKED)
        self._signal_all(signal.SIGTERM)
        self._signal_all(signal.SIGCONT)  # a stopped one would not notice
        self._await_all(TERMINATED)
        self._signal_all(signal.SIGKILL)
        self._await_all(TERMINATED)

    def _await_all(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._workers and (left := until - time.monotonic()) > 0:
            poll = select.poll()
            for pidfd in self._workers:
                poll.register(pidfd, select.POLLIN)
            for pidfd, _ in poll.poll(left * 1000):
                self._reap(pidfd)

    def _signal_all(self, number: int) -> None:
        for _, pid in self._workers.values():
            os.kill(pid, number)

    def _tell(self, note: Note) -> None:
        with contextlib.suppress(OSError):  # the loader is gone, or does not listen
            self._control.send(pickle.dumps(note, 5))


def number_of_threads() -> int:
    """Return how many threads this process has; 1 where the system does not say."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 1


def dump_instruction(word: str, worker: int = -1) -> bytes:
    """Return the frame that tells a nursery what to do: start, kill or end."""
    return pickle.dumps((word, worker), 5)


def load_note(frame: bytes) -> Any:
    """Return the note of a frame."""
    return pickle.loads(frame)  # noqa: S301  (our own nursery)
