"""Worker processes for all of torch's platforms, using only the standard library.

Each process is a new interpreter, with a pipe for requests and one for results. Two
threads per process make the calls that block: one sends requests, the other reads
results and reaps the process. A process gets one request more than it can work on, so
that it need not wait for the next one; further requests wait here.
"""

import contextlib
import functools
import multiprocessing
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from multiprocessing import connection, reduction
from typing import Any

from aioloader._base.cpu_threads import CpuThread, start_thread
from aioloader._base.forks import close_in_children, fork_safe
from aioloader._base.machine import lack_of_linux
from aioloader._base.warnings import warn
from aioloader._transport.segments import Lender
from aioloader._transport.slots import Locker
from aioloader._workers.idle import IdleSupervisors
from aioloader._workers.process.dispatcher import Dispatcher, Queue, Worker
from aioloader._workers.process.messages import (
    LEFT,
    RESULT_HEAD,
    slot_of,
    used_of,
)
from aioloader._workers.process.pool import WorkerPool
from aioloader._workers.process.recovery import stack_of
from aioloader._workers.process.supervisor import ASKED, TERMINATED, kill_group
from aioloader._workers.process.worker_main import STACK_SIGNAL
from aioloader._workers.worker_spec import Surroundings, WorkerSpec, new_python, ship
from aioloader.errors import WorkerStartError

# The head of a message: whether it is a request (else: write the stack); number and
# size of the segment that is lent with it (-1: none); whether its handle follows.
LENT = struct.Struct("<?qq?")
# Seconds between checks of a process that sends nothing; to wait for a stack; between
# polls of an awaited event; and for all threads of a pool to end.
_CHECK_SECONDS, _STACK_SECONDS, _PAUSE = 1.0, 1.0, 0.01
_END_SECONDS = ASKED + 2 * TERMINATED + 2.0


class ProcessLink:
    """The loader's link to one worker process, with pipes and pending requests."""

    def __init__(self, worker: Worker, shared: list[int], surroundings: bytes) -> None:
        self.worker = worker
        self.arena: Lender = worker.arena
        self.pending: set[int] = set()  # tickets sent and not answered
        self.late: list[tuple[float, Callable[[], None]]] = []  # when and how to end it
        self._sender = CpuThread(f"aioloader-requests-{worker.number}")
        with contextlib.ExitStack() as stack:
            # Unbuffered: the lock of a buffer would stay locked in a forked child.
            self.stacks = stack.enter_context(tempfile.TemporaryFile(buffering=0))
            self._requests, theirs = map(stack.enter_context, connection.Pipe())
            self.results, far_results = map(
                stack.enter_context, connection.Pipe(duplex=False)
            )
            files = [self.stacks.fileno(), self.arena.descriptor, *shared]
            ends, options = _inherited([theirs.fileno(), far_results.fileno()], files)
            call = f"portable_worker.main({worker.number}, {os.getpid()}, *{ends})"
            executable, command, environment = new_python(call)
            self.process = subprocess.Popen(  # noqa: S603  (this Python)
                command,
                executable=executable,
                env=environment,
                stdin=subprocess.PIPE,
                bufsize=0,
                **options,
            )
            stack.pop_all()
        self.life: Any = self.process.stdin  # closes when this process ends
        theirs.close()
        far_results.close()
        worker.pid = self.process.pid
        close_in_children(self.abandon)
        self.post(self._requests.send_bytes, surroundings)

    def post(self, write: Callable[..., object], *args: Any) -> None:
        """Call ``write`` in a thread, since it blocks if the process does not read."""

        def job() -> None:
            with contextlib.suppress(OSError):
                write(*args)

        self._sender.post(job)

    def send(self, frame: bytes | None, segments: int = 0) -> None:
        """Send a request with memory for its batch; without a frame, ask for stacks."""
        lent = None if frame is None else self.arena.lend(segments)
        number, size, handle = lent or (-1, 0, None)
        head = LENT.pack(frame is not None, number, size, handle is not None)
        try:
            self._requests.send_bytes(head + (frame or b""))
            if isinstance(handle, str):
                self._requests.send_bytes(handle.encode())
            elif handle is not None:
                reduction.send_handle(self._requests, handle, self.process.pid)
        finally:
            if isinstance(handle, int):
                os.close(handle)

    def hang_up(self) -> None:
        """End the stream of requests; ``look`` ends the process if it keeps running."""
        late = time.monotonic() + ASKED
        ends = (late, self.process.terminate), (late + TERMINATED, self.process.kill)
        self.late = self.late or [*ends]
        self._sender.stop(partial(_close, self._requests))

    def look(self) -> bool:
        """Tell whether the process runs; terminate or kill it if it is overdue."""
        if self.process.poll() is not None:
            return False
        if self.late and time.monotonic() > self.late[0][0]:
            self.late.pop(0)[1]()
        return True

    def reap(self) -> int:
        """Wait for the process to end, kill its children, return its exit status."""
        self.hang_up()
        while self.look():
            time.sleep(_PAUSE)
        if hasattr(os, "killpg"):
            kill_group(self.process.pid)
        _close(self.results)
        self.life.close()
        return int(self.process.returncode)

    def stack(self, seconds: float = 0.0) -> str:
        """Return and clear the stacks that the process writes within ``seconds``."""
        until, text = time.monotonic() + seconds, b""
        with contextlib.suppress(ValueError):  # another thread has closed it
            while True:
                self.stacks.seek(0)
                text = self.stacks.read()
                self.stacks.seek(0)  # the process writes from here, too
                self.stacks.truncate()
                if text or time.monotonic() > until:
                    break
                time.sleep(_PAUSE)
        return text.decode(errors="replace")

    def abandon(self) -> None:
        """Close this forked child's copies of the pipes and files."""
        for end in (self._requests, self.results, self.stacks, self.life):
            with contextlib.suppress(OSError):
                end.close()
        self.process.returncode = 0  # a forked child must not wait for it


def _close(pipe: Any) -> None:
    """Close a pipe that a child forked meanwhile must not close again.

    ``Connection.close`` forgets the descriptor only after closing it. By then, another
    thread may have opened a file of the same number, and forked.
    """
    if not hasattr(os, "fork"):
        pipe.close()
    elif (descriptor := pipe._handle) is not None:  # noqa: SLF001  (as it does)
        pipe._handle = None  # noqa: SLF001  (likewise)
        os.close(descriptor)


def _inherited(pipes: list[int], files: list[int]) -> tuple[list[int], dict[str, Any]]:
    """Return the descriptors or handles to inherit, and options for ``Popen``."""
    if sys.platform != "win32":
        both = pipes + files
        return both, {"pass_fds": both, "start_new_session": True}
    import msvcrt

    handles = pipes + list(map(msvcrt.get_osfhandle, files))
    for handle in handles:
        os.set_handle_inheritable(handle, True)  # noqa: FBT003  (its only argument)
    startup = subprocess.STARTUPINFO(lpAttributeList={"handle_list": handles})
    flags = subprocess.CREATE_NEW_PROCESS_GROUP
    return handles, {"startupinfo": startup, "creationflags": flags}


class ProcessQueue(Queue):
    """A queue for one or more processes; each gets a few requests at a time."""

    def __init__(self, depth: int) -> None:
        self.waiting = deque()
        self.links: list[ProcessLink] = []
        self._depth = depth

    def send(self, ticket: int, frame: bytes) -> bool:
        if ticket < 0:  # a message to all workers, not a request for a batch
            for link in self.links:
                link.post(link.send, frame)
            return True
        if not any(len(link.pending) < self._depth for link in self.links):
            return False
        link = min(self.links, key=lambda link: len(link.pending))
        link.pending.add(ticket)
        link.post(link.send, frame, len(link.pending))
        return True

    def taken(self) -> set[int]:
        return {ticket for link in self.links for ticket in link.pending}


class PortablePool(WorkerPool):
    """A pool of new interpreters connected by pipes; threads read the results."""

    def __init__(
        self, spec: WorkerSpec, supervisors: IdleSupervisors, locker: Locker | None
    ) -> None:
        super().__init__(supervisors)
        self._links: dict[int, ProcessLink] = {}  # by worker
        self._all: set[ProcessLink] = set()  # until they are reaped
        self._gone = fork_safe(threading.Condition(fork_safe(threading.RLock())))
        make_queue = partial(ProcessQueue, 2 if spec.is_plain else spec.window + 1)
        self._surroundings = pickle.dumps(
            (Surroundings(), multiprocessing.current_process().name), 5
        )
        # Hold the lock: one worker may fail before the last one has started.
        with contextlib.ExitStack() as stack, self._lock:
            self._shared = ship(spec)  # the spec's file, and shared memory
            for descriptor in self._shared:
                stack.callback(os.close, descriptor)
            self._dispatcher = Dispatcher(
                *(spec, stack, make_queue, partial(Lender, locker)),
                are_forks=False,
                has_memory=False,
            )
            starting = stack.enter_context(contextlib.ExitStack())
            starting.callback(self._hang_up)
            close_in_children(self._abandon)
            for worker in self._dispatcher.workers:
                self._start(worker)
            starting.pop_all()
            self._stack = stack.pop_all()

    def _start(self, worker: Worker) -> None:
        worker.starts += 1
        try:
            link = ProcessLink(worker, self._shared, self._surroundings)
        except OSError as error:
            text = f"worker process {worker.number} could not be started: {error}"
            raise WorkerStartError(text) from error
        self._links[worker.number] = link
        self._all.add(link)
        worker.queue.links.append(link)
        run, name = partial(self._listen, link), f"aioloader-worker-{worker.number}"
        start_thread(threading.Thread(target=run, name=name, daemon=True))
        self._dispatcher.flush()

    def _listen(self, link: ProcessLink) -> None:
        """Receive a process's results until it ends; then replace the process."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                if link.results.poll(_CHECK_SECONDS / (10 if link.late else 1)):
                    self._accept(link, link.results.recv_bytes())
                elif not link.look():
                    break
        code = link.reap()
        with self._lock:
            link.worker.queue.links.remove(link)
            if not self._is_over:
                try:
                    self._replace(link.worker, code, link.stack())
                except BaseException as error:  # every iteration must raise it
                    self._fail(error)
            link.stacks.close()
        with self._gone:
            self._all.remove(link)
            self._gone.notify_all()

    def _accept(self, link: ProcessLink, frame: bytes) -> None:
        kind, _, ticket, *_ = RESULT_HEAD.unpack_from(frame)
        with self._lock:
            if (slot := slot_of(frame, RESULT_HEAD.size)) is not None:
                used = used_of(frame, RESULT_HEAD.size)
                link.arena.arrive(slot, used, memoryview(frame))
            link.pending.discard(ticket)
            try:
                if kind == LEFT:
                    self._keep_left(frame)
                elif not self._is_over:
                    if error := self._dispatcher.accept(frame):
                        self._fail(error)
                    else:
                        self._dispatcher.flush()
            except BaseException as error:  # of user code, such as an exit
                self._fail(error)

    def _kill(self, worker: Worker) -> None:
        self._links[worker.number].process.kill()

    def _stack_of(self, worker: Worker) -> str:
        link = self._links[worker.number]
        if STACK_SIGNAL:
            return stack_of(link.process.pid, link.stack)
        link.stack()  # discard an old one
        link.post(link.send, None)
        text = link.stack(_STACK_SECONDS)
        return f"its Python stack:\n{text}" if text else "it does not answer"

    def end(self) -> None:
        with self._lock:
            if self._is_over:
                return
            self._hang_up()
            self._dispatcher.close()
        self._stack.close()

    def _hang_up(self) -> None:
        """Ask all processes to end, and wait for them in the background."""
        self._is_over = True
        for link in list(self._all):
            link.hang_up()
        self._supervisors.wait_later(self._wait)

    def _wait(self) -> bool:
        with self._gone:
            is_gone = self._gone.wait_for(lambda: not self._all, _END_SECONDS)
        for link in list(self._all):  # stopped while it wrote a result
            link.process.kill()
        return is_gone

    def _abandon(self) -> None:
        """Forget the processes in a forked child, as they belong to its parent."""
        self._is_over = self._is_ended = True
        self._all.clear()


@functools.cache
def _warn_of_start(why: str) -> None:
    warn(f"workers are new interpreters, which take seconds to start: {why}")


def start_unforked(
    spec: WorkerSpec, method: str, supervisors: IdleSupervisors, locker: Locker | None
) -> WorkerPool:
    """Let the fork server fork workers if asked and possible, or start new Pythons."""
    lack = lack_of_linux()
    if method == "forkserver":
        from aioloader._workers.process.fork_server import warm_fork_server
        from aioloader._workers.process.pool import ProcessPool

        threads = warm_fork_server().wait()
        if not threads:
            return ProcessPool(spec, method, supervisors, locker)
        _warn_of_start(
            f"every Python process here starts threads ({threads}), an agent's or an "
            "import's, and cannot be forked; keep the agent out of workers, or let "
            "them inherit your process with multiprocessing_context='fork'"
        )
    elif lack and lack != "Linux":
        _warn_of_start(f"those of Linux need {lack}")
    return PortablePool(spec, supervisors, locker)
