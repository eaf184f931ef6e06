"""The main loop of a worker process, which makes and sends a batch per request.

Plain code runs in the main thread, request by request (``_serve_sync``). If some code
is ``async``, the worker runs a pipeline, as the loader does (``_Server``). Its private
loop reads many samples at once, across batch boundaries, and a thread runs plain code.
The process is a ``multiprocessing.Process``, so the usual hooks run at start and exit.
"""

import abc
import contextlib
import ctypes
import faulthandler
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch

from aioloader._base.forks import reopen_files
from aioloader._base.raising import usable
from aioloader._base.records import NOT_MADE, BatchTimes
from aioloader._base.retry import last_error
from aioloader._order.epoch import EpochPosition
from aioloader._pipeline.batch_maker import BatchMaker
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.lifespan import Lifespan
from aioloader._pipeline.pipeline import Pipeline
from aioloader._pipeline.runner import GRACE, Runners
from aioloader._pipeline.stream import StreamBatcher
from aioloader._transport.arena import MAX_IN_FLIGHT, ArenaReader, ArenaWriter
from aioloader._transport.channel import Channel, write_small
from aioloader._transport.codec import decode
from aioloader._workers.info import SEEDS
from aioloader._workers.process.messages import (
    ANSWER,
    BATCH,
    FATAL,
    LEFT,
    READY,
    RESULT_HEAD,
    STAGES,
    WAITING_BYTES,
    Packer,
    Request,
    unpack,
)
from aioloader._workers.remote_tasks import RemoteError, maker_of, refused, remote
from aioloader._workers.worker_spec import WorkerSpec
from aioloader.errors import WorkerDiedError
from aioloader.protocols import Kind

MOST_INLINE = (1 << 16) - 1024
_CODES = {stage: code for code, stage in enumerate(STAGES)}
# A worker writes its stacks on this signal. On macOS it is SIGINFO; 0: there is none.
STACK_SIGNAL = int(getattr(signal, "SIGINFO", 0))
if hasattr(signal, "SIGRTMIN"):
    STACK_SIGNAL = int(signal.SIGRTMIN) + 7
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _MMAP_BYTES = 1 << 26, 1 << 25
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class WorkerDescriptors(NamedTuple):
    """The descriptors that a worker process inherits from its supervisor."""

    arena: int  # the memory for its batches, and the table of those in flight
    requests: int  # the queue of requests, for any worker or for this one
    results: int  # shared by all workers, as are the next three
    small: int  # the pipe of small results
    stacks: int  # the pipe to which ``faulthandler`` writes stacks
    samples: int = -1  # memory with samples, if the loader reads them


class Endpoint(abc.ABC):
    """A worker's connection to its pool, for receiving requests and sending results."""

    spec: WorkerSpec  # set by ``prepare``, like ``maker``
    maker: BatchMaker

    def __init__(self, worker: int, arena: Any) -> None:
        self.id = worker
        self._arena = arena  # memory for batches, and the table of those in flight
        self._packer = Packer(arena, MOST_INLINE)

    def prepare(self, spec: WorkerSpec) -> None:
        self.spec = spec
        inline = min(MOST_INLINE, WAITING_BYTES // spec.in_flight)
        self._packer = Packer(self._arena, inline)
        self.maker = maker_of(spec, allocate=self._packer.allocate, **SEEDS)
        self._is_restored = not self.maker.keeps_state

    def give_up(self, error: BaseException) -> NoReturn:
        """End this worker; unless ``error`` is an exit, make the loader raise it."""
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            _end_process(error)
        with contextlib.suppress(OSError):  # the loader is gone
            self._packer.reset()
            self.send(FATAL, -1, RemoteError.of(error, self.id))
        raise SystemExit(1)

    def leave(self, leave: Callable[[], object]) -> None:
        """Call ``leave``; send its error, or print the error if the loader is gone."""
        try:
            leave()
        except BaseException as error:  # of the user's code
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                name, pid = type(error).__name__, os.getpid()
                error = WorkerDiedError(
                    f"DataLoader worker (pid(s) {pid}) exited unexpectedly: {name} in "
                    "stage 'lifespan'",
                    pid=pid,
                )
            try:
                self._packer.reset()
                self.send(LEFT, -1, RemoteError.of(error, self.id))
            except OSError:
                sys.excepthook(type(error), error, error.__traceback__)

    @abc.abstractmethod
    def receive(self) -> Request:
        """Return the next request; raise ``EOFError`` if the loader is gone."""

    @abc.abstractmethod
    def pause(self, seconds: float | None) -> None:
        """Sleep (None: forever); raise ``EOFError`` as soon as the loader is gone."""

    @abc.abstractmethod
    def send_frame(self, kind: int, frame: bytes) -> None:
        """Send a packed result of the given ``kind`` to the loader."""

    def take(self, request: Request, place: int) -> BatchTask:
        self._arena.begin(place, request.ticket)
        task = BatchTask(*request.asked)
        task.again = request.again
        try:
            self.maker.begin_epoch(*request.epochs)
            if not self._is_restored:
                self._restore(request.resume)
        except BaseException as error:  # of user code; handed to the consumer
            task.result = BatchResult(error=error)
        return task

    def _restore(self, resume: Any) -> None:
        """Load the saved state, if any, into this worker's copy of the dataset."""
        self._is_restored, saved = True, self.spec.datasets
        if resume is not None:  # after a death
            self.maker.dataset.load_state_dict(*map(usable, resume))
        elif self.id in saved:
            self.maker.dataset.load_state_dict(saved[self.id])

    def enter(self, stage: str, place: int = 0) -> None:
        self._arena.enter(place, _CODES[stage])

    def answer(
        self, task: BatchTask, ticket: int, place: int, result: BatchResult
    ) -> None:
        """Send the result of a request; the request is then no longer in flight."""
        if isinstance(result.error, (KeyboardInterrupt, SystemExit)):
            _end_process(result.error)
        self.enter("send", place)
        maker, policy, kind, value = self.maker, self.maker.policy, BATCH, result.batch
        # The loader keeps the list of failures and their limit.
        has_more = task.failures or policy.retries or task.missing
        is_batch = not (has_more or result.is_empty or result.is_end)
        if not (is_batch and result.error is task.state is result.dataset is None):
            kind, value = ANSWER, remote(maker, task, result, self.id)
            result.state = task.state
            result.dataset = result.dataset and (self.id, result.dataset[1])
        try:
            self.send(kind, ticket, value, task.made())
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:  # not picklable, or too large
            self._packer.reset()
            value = refused(maker, task, result, error, self.id)
            self.send(ANSWER, ticket, value, task.made())
        self._arena.clear(place)

    def send(
        self,
        kind: int,
        ticket: int = -1,
        value: Any = None,
        made: BatchTimes = NOT_MADE,
    ) -> None:
        head = RESULT_HEAD.pack(kind, self.id, ticket, *made)
        self.send_frame(kind, b"".join((head, *self._packer.pack(value))))


class KernelEndpoint(Endpoint):
    """An endpoint on Linux, which reads a queue and writes to a channel or a pipe."""

    def __init__(self, worker: int, ends: WorkerDescriptors) -> None:
        super().__init__(worker, ArenaWriter(ends.arena))
        self._ends = ends
        self._results = Channel.adopt(ends.results)
        self._samples: ArenaReader | None = None

    def prepare(self, spec: WorkerSpec) -> None:
        super().prepare(spec)
        self._requests = Channel.adopt(self._ends.requests)
        if not spec.reads:
            self._samples = ArenaReader(self._ends.samples)

    def receive(self) -> Request:
        received = self._requests.receive_frame()
        assert received is not None
        if self._samples is None:
            return Request._make(decode(received[0]))
        return Request._make(unpack(received[0], 0, self._samples))

    def pause(self, seconds: float | None) -> None:
        self._requests.pause(seconds)

    def send_frame(self, kind: int, frame: bytes) -> None:
        # Only batches use the pipe: a worker's other messages must stay in order.
        if kind != BATCH or not write_small(self._ends.small, frame):
            self._results.send_frame(frame)


def _end_process(error: BaseException) -> NoReturn:
    """End the process with the exit status in ``error``, or with 1 if there is none.

    Such errors also end torch's workers. The loader handles the worker's death.
    """
    code = error.code if isinstance(error, SystemExit) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def settle(worker: int, ends: WorkerDescriptors, supervisor: int) -> None:
    """Set up this newly forked process as a worker that dies with its supervisor."""
    # Its own session: processes that it starts end with it, and debuggers may read the
    # terminal. Linux may share processor time by session (sched_autogroup).
    os.setsid()
    reopen_files()
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    die_with(supervisor)
    os.set_blocking(ends.stacks, False)
    tune(worker, ends.stacks)


def tune(worker: int, stacks: int) -> None:
    """Configure this worker process's signals, torch threads, name, memory and stacks.

    Freed blocks are kept for the next batch: by default large ones return to the
    kernel, and page faults follow. Stacks are written to the descriptor ``stacks``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with contextlib.suppress(AttributeError, OSError, TypeError):  # only Linux has all
        libc, name = ctypes.CDLL(None), f"aioloader-{worker}".encode()
        libc.prctl(_PR_SET_NAME, name, 0, 0, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
    faulthandler.enable(stacks)
    if STACK_SIGNAL:
        signal.signal(STACK_SIGNAL, partial(write_last_error, stacks))
        faulthandler.register(STACK_SIGNAL, stacks, chain=True)


def write_last_error(stacks: int, *_: object) -> None:
    """Write the last error of the reads that are being retried to ``stacks``."""
    with contextlib.suppress(OSError):
        os.write(stacks, last_error().encode())


def die_with(parent: int | None) -> None:
    """Make the kernel kill this process when ``parent`` ends; None undoes this.

    The kernel watches the parent's *thread*, so the parent must have only one thread.
    """
    number = signal.SIGKILL if parent is not None else 0
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(0)


def run(endpoint: Endpoint, load: Callable[[], WorkerSpec]) -> None:
    """Load the spec, then serve requests until the loader is gone.

    An error outside of batches ends all iterations; the loader raises it.
    """
    try:
        spec = load()
        spec.begin(endpoint.id)
        endpoint.prepare(spec)
        spec.initialise(endpoint.id, endpoint.maker)
    except BaseException as error:  # raised by the loader
        endpoint.give_up(error)
    try:
        if endpoint.maker.is_plain:
            _serve_sync(endpoint)
        else:
            with contextlib.closing(_Server(endpoint)) as server:
                server.serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the loader is gone
    except Exception as error:
        endpoint.give_up(error)


def _serve_sync(endpoint: Endpoint) -> None:
    maker, enter, streams = endpoint.maker, endpoint.enter, dict[int, StreamBatcher]()
    read: Callable[[BatchTask], object] | None = None
    if maker.reads:
        read = partial(maker.read, pause=endpoint.pause)
    reads_stream = maker.reads and maker.kind is Kind.ITERABLE
    lifespan = Lifespan(maker.dataset, endpoint.spec.lifespan)
    try:
        lifespan.enter()
    except BaseException as error:  # raised by the loader
        endpoint.give_up(error)
    with contextlib.ExitStack() as stack:
        stack.callback(endpoint.leave, lifespan.leave)
        endpoint.send(READY)
        try:
            while True:
                request = endpoint.receive()
                if request.ticket < 0:
                    if request.iteration in streams:
                        streams.pop(request.iteration).close()
                    continue
                task = endpoint.take(request, 0)
                if reads_stream:
                    stream = streams.get(request.iteration)
                    if stream is None:
                        state, keys = request.resume or (None, None)
                        stream = StreamBatcher(maker, resume=state, keys=keys)
                        streams[request.iteration] = stream
                    read = stream.pull
                result = task.result or maker.make(task, read, enter)
                if isinstance(result.error, (KeyboardInterrupt, SystemExit)):
                    raise result.error  # as in torch, it ends the worker
                endpoint.answer(task, request.ticket, 0, maker.add_state(task, result))
        finally:
            for stream in streams.values():
                stream.close()


_OVER = -1


class _Server:
    """An async worker's server, which passes requests to pipelines in this process.

    The main thread takes at most ``window`` requests at a time, so that free workers
    can take the others.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        spec = endpoint.spec
        self._endpoint = endpoint
        self._size = max(1, min(MAX_IN_FLIGHT, spec.window))
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for place in range(self._size):
            self._free.put(place)
        # By the task's ``id``: its ticket, and the places that it occupies.
        self._held: dict[int, tuple[int, list[int]]] = {}
        self._runners = Runners(spec.dataset, spec.lifespan)
        self._runners.keep()
        self._runner = self._runners.lease("loop")
        self._pipelines: dict[int, Pipeline] = {}

    def serve(self) -> None:
        """Take requests while there is a free place, until the loader is gone.

        The dataset's lifespan is entered on the loop that reads the dataset.
        """
        endpoint = self._endpoint
        self._runner.open()
        failure = self._runner.failure()
        if failure is not None:
            endpoint.give_up(failure)
        endpoint.send(READY)
        threading.Thread(target=self._watch, daemon=True).start()
        while True:
            place = self._free.get()
            if place == _OVER:
                raise EOFError("the loader is gone")
            request = endpoint.receive()
            if request.ticket < 0:
                pipeline = self._pipelines.pop(request.iteration, None)
                if pipeline is not None:
                    pipeline.dismiss()
                self._free.put(place)
                continue
            extra = self._size - 1 if request.is_alone else 0
            places = [place, *(self._free.get() for _ in range(extra))]
            task = endpoint.take(request, place)
            self._held[id(task)] = request.ticket, places
            if task.result is not None:
                self._deliver(task, task.result)
            else:
                self._pipeline_of(request).submit([task])

    def _watch(self) -> None:
        """Wake ``serve`` when the loader is gone, even if no place is free."""
        with contextlib.suppress(EOFError):
            self._endpoint.pause(None)
        self._free.put(_OVER)

    def close(self) -> None:
        """End all iterations, wait for them, and leave the lifespan."""
        for pipeline in self._pipelines.values():
            pipeline.dismiss()
        for pipeline in self._pipelines.values():
            pipeline.ended.wait(GRACE)
        self._runner.release()
        self._runners.leave()
        self._endpoint.leave(self._runners.release)

    def _pipeline_of(self, request: Request) -> Pipeline:
        # Map-style datasets have no state per iteration: one pipeline serves them all.
        key = request.iteration if self._endpoint.maker.is_stream() else -1
        pipeline = self._pipelines.get(key)
        if pipeline is None:
            pipeline = self._pipelines[key] = Pipeline(
                self._endpoint.maker,
                self._runners.lease("loop"),
                start=EpochPosition(states={0: request.resume and request.resume[0]}),
                sink=self._deliver,
            )
        return pipeline

    def _deliver(self, task: BatchTask, result: BatchResult) -> None:
        """Send a task's result and free its places; called from any thread."""
        ticket, places = self._held.pop(id(task))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            # If the loader is gone, the thread that reads requests ends this process.
            self._endpoint.answer(task, ticket, places[0], result)
        for place in places:
            self._free.put(place)
