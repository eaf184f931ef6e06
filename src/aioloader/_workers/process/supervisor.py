"""The supervisor: a process that is the parent of a loader's workers.

A supervisor forks workers with its copy of the dataset, reports their starts and deaths
to the loader, and forks replacements. To end workers, it waits for them, then sends
SIGTERM, then SIGKILL. A supervisor that ``iter()`` forks from the user's process
inherits the dataset and serves one set of workers. A supervisor that the fork server
forks serves a loader for many epochs and unpickles the dataset for each set of workers.
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
# Instead of an exit status if the worker's supervisor has died, too.
UNKNOWN = -1000
# Signals for which supervisor and workers set their own handlers.
_OWN_SIGNALS = {
    signal.SIGINT,
    signal.SIGTERM,
    getattr(signal, "SIGCHLD", signal.SIGTERM),
}


class SupervisorReport(NamedTuple):
    """A report to the loader about a supervisor or one of its workers."""

    # From the supervisor: "alive" (it runs), "up" (it can fork; ``number``: its pid),
    # "born" (a worker; its pid), "died" (a worker; its exit status), "ended" (all
    # workers have), "threads" (it cannot fork: unpickling has started threads) and
    # "failed" (``error``). From the launcher: "orphaned" (the supervisor has died).
    word: str
    worker: int = -1
    number: int = 0
    error: RemoteError | None = None


@dataclass(eq=False, repr=False)
class Supervisor:
    """The process that forks and reaps workers, as the loader instructs it."""

    control: Channel  # to the loader
    loader: int  # pidfd of the loader's process
    user: int  # the pid of the loader's process
    # The workers' spec, if this process inherited it. None: for each set of workers the
    # loader sends a file with a pickle.
    spec: WorkerSpec | None = None
    ends: Sequence[int] = ()  # the descriptors that all workers share
    collects: bool = True  # whether workers turn the garbage collector on

    def __post_init__(self) -> None:
        self._is_served = self.spec is None
        self._file = -1
        self._surroundings: Surroundings | None = None
        # By pidfd: the worker's number, and its ``multiprocessing`` process.
        self._workers: dict[int, tuple[int, Any]] = {}
        # The user's process: ``multiprocessing.parent_process()`` of the workers.
        self._parent: Any = _parent_by(self.user, self.loader)
        os.setpgid(0, 0)  # a SIGTERM to the user's process group must not arrive here
        self._handlers = _ignored_signals()

    def serve(self) -> None:
        """Follow instructions until the loader is gone or needs no more workers."""
        try:
            with contextlib.suppress(EOFError):
                while self._wait_and_act():
                    pass
        finally:
            self._kill_all()

    def tell(self, note: SupervisorReport) -> None:
        with contextlib.suppress(OSError):  # the loader is gone, or does not read
            self.control.send_frame(pickle.dumps(note, 5))

    def _wait_and_act(self) -> bool:
        """Wait for events and handle them; return False if the supervisor must end."""
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
        """Apply settings and load the spec; return whether workers can be forked.

        If threads or an error prevent that, this process ends: workers that are forked
        despite threads may take requests and lose them.
        """
        self._file, *self.ends = descriptors
        self._surroundings = surroundings
        self.tell(SupervisorReport("up", number=os.getpid()))
        try:
            surroundings.enter()
            # While user code is stuck, this process does not see that the loader ends.
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
        """End the workers; most end by themselves, because their queues are closed."""
        if not connection.wait([self.loader], timeout=0):  # the loader still runs
            self._await_all(ASKED)
        for _, process in self._workers.values():
            process.terminate()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)  # a stopped process would not end
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
        # SIGTERM raises SystemExit: during a fork, its traceback would be printed.
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
        gc.freeze()  # a collection would write to, and so copy, every page
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
        kill_group(process.pid)  # processes that the worker started
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
        """Reap workers until none is left; wait at most ``seconds``."""
        until = time.monotonic() + seconds
        while self._workers and (left := until - time.monotonic()) > 0:
            for watched in connection.wait([*self._workers], left):
                self._reap(watched)  # type: ignore[arg-type]


def be_forked(
    control: Channel, loader: int, spec: WorkerSpec, ends: list[int], *, collects: bool
) -> None:
    """Run the supervisor that ``iter()`` forks from the user's process.

    The garbage collector stays off. If it freed an object of the parent's event loop,
    the parent's sockets could be unregistered: both processes share the selector.
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
    importlib.import_module("numpy.random")  # once for all workers; it takes 6 ms
    supervisor.serve()


def _try_locks() -> None:
    """Take every lock that workers need; hang if a thread held a lock at the fork.

    After a hang the loader forks again. Each output stream has its own lock. numpy's
    lock is part of the bit generator, so a new bit generator's lock is free.
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
            with contextlib.suppress(ValueError):  # the stream is closed
                buffer.write(b"")


def _parent_by(pid: int, watched: int) -> Any:
    """Return ``multiprocessing``'s object for a parent, given its pid and pidfd."""
    known = multiprocessing.parent_process()
    name = "MainProcess" if known is None else known.name
    process: Any = multiprocessing.process
    return process._ParentProcess(name, pid, watched)  # noqa: SLF001  (there is no public way)


def _ignored_signals() -> dict[int, Any]:
    """Ignore signals that the user handles; return the handlers for the workers.

    The user's handlers must not run here. This also installs the supervisor's handlers.
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
    """Kill a worker's process group: the worker and the processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def names_of_threads() -> str:
    """Return the names of this process's threads, except the main thread's, as text."""
    tasks = [*Path("/proc/self/task").glob("*/comm")]
    if len(tasks) < 2:
        return ""
    main = threading.main_thread()
    names = [thread.name for thread in threading.enumerate() if thread is not main]
    return ", ".join(names or [task.read_text().strip() for task in tasks][1:])
