"""The worker's side of ``portable``: a new interpreter that serves two pipes.

A thread receives requests as they arrive, so that the loader can always send. When the
thread sees that the loader has ended, it ends this process and the processes that this
process has started.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
from multiprocessing import connection, reduction
from typing import Any

from aioloader._transport.codec import decode
from aioloader._transport.segments import Borrower, Handle
from aioloader._workers import sharing
from aioloader._workers.process import worker_main
from aioloader._workers.process.messages import (
    RESULT_HEAD,
    Request,
    slot_of,
    used_of,
)
from aioloader._workers.process.portable import LENT
from aioloader._workers.process.supervisor import ASKED, kill_group
from aioloader._workers.worker_spec import receive

# Seconds between checks of the loader, whose forks may keep the pipe open.
_CHECK_SECONDS = 1.0


class PipeEndpoint(worker_main.Endpoint):
    """An endpoint that gets requests from one pipe and sends results to another."""

    def __init__(
        self, worker: int, loader: int, table: int, requests: Any, results: Any
    ) -> None:
        super().__init__(worker, Borrower(table))
        self._loader = loader
        self._requests, self._results = requests, results
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._is_gone = threading.Event()

    def listen(self, stacks: int) -> None:
        """Receive requests in a thread until the loader ends; then end this process."""
        if sys.platform != "win32" and worker_main.STACK_SIGNAL:  # for the main thread
            signal.pthread_sigmask(signal.SIG_BLOCK, {worker_main.STACK_SIGNAL})
        with contextlib.suppress(EOFError, OSError):
            while True:
                if not self._requests.poll(_CHECK_SECONDS):
                    if os.name == "posix" and os.getppid() != self._loader:
                        break
                    continue
                message = self._requests.recv_bytes()
                is_request, number, size, is_new = LENT.unpack_from(message)
                if not is_request:
                    faulthandler.dump_traceback(stacks)
                    worker_main.write_last_error(stacks)
                    continue
                handle: Handle | None = None
                if is_new and sys.platform == "win32":
                    handle = self._requests.recv_bytes().decode()
                elif is_new:
                    handle = reduction.recv_handle(self._requests)
                if number >= 0:
                    self._arena.add(number, size, handle)
                self._inbox.put(message[LENT.size :])
        self._is_gone.set()
        self._inbox.put(None)
        threading.Event().wait(ASKED)  # if this returns, user code is stuck
        end_all()

    def receive(self) -> Request:
        frame = self._inbox.get()
        if frame is None:
            self._inbox.put(None)
            raise EOFError("the loader is gone")
        return Request._make(decode(frame))

    def pause(self, seconds: float | None) -> None:
        if self._is_gone.wait(seconds):
            raise EOFError("the loader is gone")

    def send_frame(self, kind: int, frame: bytes) -> None:  # noqa: ARG002  (one pipe)
        slot = slot_of(frame, RESULT_HEAD.size)
        if slot is not None:
            rest = self._arena.piped(slot, used_of(frame, RESULT_HEAD.size))
            frame = b"".join((frame, rest)) if rest else frame
        with self._sending:
            self._results.send_bytes(frame)


def end_all() -> None:
    """End this process and, except on Windows, the processes that it has started."""
    if hasattr(os, "killpg"):
        kill_group(os.getpid())
    os._exit(1)


def main(worker: int, loader: int, *ends: int) -> None:
    """Run a worker in this interpreter; hooks of ``multiprocessing`` run as usual."""
    pipe: Any = connection.Connection
    files = list(ends[2:])
    if sys.platform == "win32":
        import msvcrt

        pipe = connection.PipeConnection
        files = [msvcrt.open_osfhandle(handle, os.O_APPEND) for handle in files]
    else:
        for descriptor in ends:
            os.set_inheritable(descriptor, False)  # noqa: FBT003  (its only argument)
    stacks, table, *shared = files
    life = os.dup(0)  # closes when the loader ends
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    requests, results = pipe(ends[0], writable=True), pipe(ends[1], readable=False)
    try:
        surroundings, parent = pickle.loads(requests.recv_bytes())  # noqa: S301  (our own)
    except EOFError:  # the loader ended while it started this process
        os._exit(1)
    endpoint = PipeEndpoint(worker, loader, table, requests, results)
    process: Any = multiprocessing.get_context("spawn").Process(
        target=_serve,
        args=(endpoint, surroundings, shared, stacks),
        name=f"aioloader-{worker}",
    )
    process._parent_pid, process._parent_name = loader, parent  # noqa: SLF001  (as below)
    code = process._bootstrap(parent_sentinel=life)  # noqa: SLF001  (as spawn_main)
    if os.name == "posix" and os.getppid() != loader:
        end_all()
    os._exit(code)


def _serve(
    endpoint: PipeEndpoint, surroundings: Any, shared: list[int], stacks: int
) -> None:
    worker_main.tune(endpoint.id, stacks)
    surroundings.enter()
    surroundings.enter_environment()
    multiprocessing.set_start_method("spawn", force=True)
    sharing.received[:] = shared[1:]
    threading.Thread(target=endpoint.listen, args=(stacks,), daemon=True).start()
    worker_main.run(endpoint, lambda: receive(shared[0]))
