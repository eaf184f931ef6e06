"""The supervisor: the parent of a loader's workers, in a process below the user's.

A supervisor forks workers with its copy of the dataset, reports starts and deaths to
the loader, forks replacements, and ends everything: it waits, then terminates, then
kills. ``iter()`` forks one from the user's process, for one set of workers; it inherits
the dataset. The fork server forks the other kind, which serves a loader from epoch to
epoch, and unpickles the dataset for each set of workers.
"""

import contextlib
import gc
import importlib
import io
import logging
import multiprocessing.process
import os
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from aioloader._base.forks import reopen_files
from aioloader._transport.channel import Channel
from aioloader._transport.codec import decode
from aioloader._workers import sharing
from aioloader._workers.process import worker_main
from aioloader._workers.remote_tasks import RemoteError
from aioloader._workers.worker_spec import Surroundings, WorkerSpec, receive

# Seconds for workers to end by themselves, and then after SIGTERM.
ASKED = 3.0
TERMINATED = 1.0
# The exit status of a worker whose supervisor has died, too.
UNKNOWN = -1000
# Signals that supervisor and workers handle themselves.
_OWN_SIGNALS = {
    signal.SIGINT,
    signal.SIGTERM,
    getattr(signal, "SIGCHLD", signal.SIGTERM),
}


class SupervisorReport(NamedTuple):
    """A report of a supervisor to the loader."""

    # ``"alive"`` (it runs), ``"up"`` (it can fork; its pid), ``"born"`` (worker, pid),
    # ``"died"`` (worker, exit status), ``"ended"`` (all workers), ``"threads"`` (it
    # cannot fork: unpickling has started threads) or ``"failed"`` (error); the loader
    # adds ``"orphaned"``: it has died.
    word: str
    worker: int = -1
    number: int = 0
    error: RemoteError | None = None


@dataclass(eq=False, repr=False)
class Supervisor:
    """Fork and reap workers on the loader's instructions."""

    control: Channel  # to the loader
    loader: int  # watches its process
    user: int  # the pid of the loader's process
    # The workers' spec, if they inherit it; None: the loader sends a file with each set
    # of workers, which unpickle it.
    spec: WorkerSpec | None = None
    ends: Sequence[int] = ()  # the descriptors that all workers share
    collects: bool = True  # whether the garbage collector of the workers is on

    def __post_init__(self) -> None:
        self._is_served = self.spec is None
        self._file = -1
        self._surroundings: Surroundings | None = None
        # By pidfd of each process: the worker's number, the process.
        self._workers: dict[int, tuple[int, Any]] = {}
        # ``multiprocessing.parent_process()`` in a worker: the user's process.
        self._parent: Any = _parent_by(self.user, self.loader)
        os.setpgid(0, 0)  # a SIGTERM to the user's group is for the user's process
        self._handlers = _ignored_signals()

    def serve(self) -> None:
        """Follow instructions until the loader is gone or needs no workers."""
        try:
            with contextlib.suppress(EOFError):
                while self._wait_and_act():
                    pass
        finally:
            self._kill_all()

    def tell(self, note: SupervisorReport) -> None:
        with contextlib.suppress(OSError):  # it is gone, or does not read
            self.control.send_frame(pickle.dumps(note, 5))

    def _wait_and_act(self) -> bool:
        """Wait for an event and handle it; return whether there may be more."""
        ready: list[Any] = connection.wait([self.control, self.loader, *self._workers])
        for watched in {*ready} & {*self._workers}:
            self.tell(self._reap(watched))
        if self.control not in ready:
            return self.loader not in ready
        received = self.control.receive_frame()
        assert received is not None
        word, argument = decode(received[0])
        if word == "begin":
            return self._begin(*argument, descriptors=received[1])
        if word == "share":
            sharing.received.extend(received[1])
        elif word == "start":
            self._start(argument, received[1])
        elif word == "kill":
            for number, process in self._workers.values():
                if number == argument:
                    process.kill()
        else:
            self._end()
            return self._is_served
        return True

    def _begin(
        self,
        surroundings: Surroundings,
        is_shared: bool,  # noqa: FBT001  (from a message)
        *,
        descriptors: list[int],
    ) -> bool:
        """Enter the surroundings and unpickle; return whether workers can be forked.

        If they cannot, this process ends: its workers would take requests and lose
        them.
        """
        self._file, *self.ends = descriptors
        self._surroundings = surroundings
        self.tell(SupervisorReport("up", number=os.getpid()))
        try:
            surroundings.enter()
            # If user code is stuck, this process would not see the loader's end.
            worker_main.die_with(os.getppid())
            if is_shared:
                self.spec = receive(self._file)
            worker_main.die_with(None)
        except BaseException as error:
            self.tell(SupervisorReport("failed", error=RemoteError.of(error, 0)))
            return False
        if names_of_threads():
            self.tell(SupervisorReport("threads"))
            return False
        return True

    def _end(self) -> None:
        """End the workers: their queues are closed, so most end by themselves."""
        if not connection.wait([self.loader], timeout=0):  # it is not alone
            self._await_all(ASKED)
        for _, process in self._workers.values():
            process.terminate()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)  # a stopped one would not notice
        self._await_all(TERMINATED)
        self._kill_all()
        if self._is_served:
            for descriptor in (self._file, *self.ends, *sharing.received):
                os.close(descriptor)
            self.spec, self.ends = None, []
            sharing.received.clear()
            gc.collect()
            self.tell(SupervisorReport("ended"))

    def _start(self, worker: int, descriptors: list[int]) -> None:
        ends = worker_main.WorkerDescriptors(*descriptors, *self.ends)
        process: Any = multiprocessing.get_context("fork").Process(
            target=self._be_worker, args=(worker, ends), name=f"aioloader-{worker}"
        )
        # A SystemExit during a fork is printed, by this process or by the worker.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            process.start()
            assert process.pid is not None
            self._workers[os.pidfd_open(process.pid)] = worker, process
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        for descriptor in descriptors:
            os.close(descriptor)
        self.tell(SupervisorReport("born", worker, process.pid))

    def _be_worker(self, worker: int, ends: worker_main.WorkerDescriptors) -> None:
        supervisor = os.getppid()
        gc.freeze()  # a collection would touch, and so copy, every page
        own: Any = multiprocessing.process
        own._parent_process = self._parent  # noqa: SLF001  (the user's process)
        self.control.close()
        for watched in self._workers:
            os.close(watched)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        worker_main.settle(worker, ends, supervisor)
        if self._surroundings is not None:
            multiprocessing.set_start_method("forkserver", force=True)
            self._surroundings.enter_environment()
        worker_main.run(worker_main.KernelEndpoint(worker, ends), self._spec_of_worker)

    def _spec_of_worker(self) -> WorkerSpec:
        spec = receive(self._file) if self.spec is None else self.spec
        if self.collects:
            gc.enable()
        return spec

    def _reap(self, watched: int) -> SupervisorReport:
        worker, process = self._workers.pop(watched)
        os.close(watched)
        kill_group(process.pid)  # children that the worker has left
        process.join()
        status = process.exitcode
        process.close()
        return SupervisorReport("died", worker, status)

    def _kill_all(self) -> None:
        for _, process in self._workers.values():
            process.kill()
            kill_group(process.pid)
        self._await_all(TERMINATED)

    def _await_all(self, seconds: float) -> None:
        """Reap workers until none is left, for at most ``seconds``."""
        until = time.monotonic() + seconds
        while self._workers and (left := until - time.monotonic()) > 0:
            for watched in connection.wait([*self._workers], left):
                self._reap(watched)  # type: ignore[arg-type]


def be_forked(
    control: Channel, loader: int, spec: WorkerSpec, ends: list[int], *, collects: bool
) -> None:
    """Run the supervisor that ``iter()`` forks from the user's process.

    Inherited objects are never collected here: one of the parent's event loop would
    unregister the parent's sockets, because both share the selector.
    """
    gc.disable()
    gc.freeze()
    reopen_files()
    signal.set_wakeup_fd(-1)  # the parent's event loop reads the other end
    user = os.getppid()
    supervisor = Supervisor(control, loader, user, spec, ends, collects=collects)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False  # noqa: SLF001  (it and its workers have children)
    supervisor.tell(SupervisorReport("alive"))
    torch.set_num_threads(1)
    _try_locks()
    supervisor.tell(SupervisorReport("up", number=os.getpid()))
    importlib.import_module("numpy.random")  # for all workers; it takes 6 ms
    supervisor.serve()


def _try_locks() -> None:
    """Take every lock that workers need; hang if another thread held one at the fork.

    The loader then forks again. Each output stream has its own lock. numpy's lock
    belongs to its bit generator, so a new one is enough; workers seed it.
    """
    if "numpy.random" in sys.modules:
        np.random.set_bit_generator(np.random.MT19937())  # type: ignore[attr-defined]
    torch.default_generator.get_state()
    random.getstate()
    logging.getLogger(__name__)
    handlers = [reference() for reference in logging._handlerList]  # type: ignore[attr-defined]  # noqa: SLF001  (there is no other list)
    logs = [getattr(handler, "stream", None) for handler in handlers]
    for stream in (sys.stdout, sys.stderr, *logs):
        buffer = getattr(stream, "buffer", None)
        if isinstance(buffer, io.BufferedWriter):
            with contextlib.suppress(ValueError):  # it is closed
                buffer.write(b"")


def _parent_by(pid: int, watched: int) -> Any:
    """Make ``multiprocessing``'s view of a parent process from a pid and its pidfd."""
    known = multiprocessing.parent_process()
    name = "MainProcess" if known is None else known.name
    process: Any = multiprocessing.process
    return process._ParentProcess(name, pid, watched)  # noqa: SLF001  (there is no public way)


def _ignored_signals() -> dict[int, Any]:
    """Ignore signals that the user handles; return the handlers for the workers.

    The handlers are user code, meant for the user's process.
    """
    handlers: dict[int, Any] = {}
    for number in signal.valid_signals() - _OWN_SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler):
            handlers[number] = handler
            signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return handlers


def kill_group(pid: int) -> None:
    """Kill a worker and the processes that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def names_of_threads() -> str:
    """Return the names of all threads but the main one."""
    tasks = [*Path("/proc/self/task").glob("*/comm")]
    if len(tasks) < 2:
        return ""
    main = threading.main_thread()
    names = [thread.name for thread in threading.enumerate() if thread is not main]
    return ", ".join(names or [task.read_text().strip() for task in tasks][1:])
