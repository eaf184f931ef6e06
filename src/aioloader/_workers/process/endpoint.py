"""A worker's endpoint: takes requests and sends results."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from aioloader._observe.records import NOT_MADE, Made
from aioloader._order.failures import Failure
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.lifespan import Lifespan
from aioloader._transport.arena import ArenaReader, ArenaWriter
from aioloader._transport.channel import MAX_PARTS, Channel
from aioloader._transport.in_flight_table import InFlightTable
from aioloader._workers.info import seed_for_sample, seeded, use_sample_rng
from aioloader._workers.process.batch_codec import Packer, unpack
from aioloader._workers.process.messages import (
    ANSWER,
    BATCH,
    FATAL,
    LEFT,
    STAGES,
    Request,
    result_head,
)
from aioloader._workers.remote_error import RemoteError
from aioloader._workers.remote_tasks import Answer, maker_of, sendable
from aioloader._workers.rng import seed_batch
from aioloader._workers.worker_spec import WorkerSpec
from aioloader.errors import WorkerDiedError

# Bytes that may wait in the socket of results; each batch in flight has a share.
_WAITING_BYTES = 1 << 20
_MOST_INLINE = (1 << 16) - 1024
_CODES = {stage: code for code, stage in enumerate(STAGES)}


class Ends(NamedTuple):
    """Descriptors of a worker; -1 for one that it does not need.

    Attributes:
        requests: Requests for any worker, shared by all workers.
        results: Results, shared too.
        table: The in-flight table, shared too.
        stacks: Where ``faulthandler`` writes stacks on request; shared too.
        samples: The memory of samples that the loader has read; shared too.
        arena: The memory for its batches.
        own: Requests for this worker alone.
    """

    requests: int
    results: int
    table: int
    stacks: int
    samples: int
    arena: int
    own: int

    @classmethod
    def of(cls, shared: Sequence[int], apart: Sequence[int]) -> "Ends":
        """Return the descriptors of a worker from those passed by the loader.

        Args:
            shared: Those that all workers share; the last one (samples) is optional.
            apart: Those of this worker; the last one (own) is optional.
        """
        return cls(*(*shared, -1)[:5], *(*apart, -1)[:2])


class _Packers(threading.local):
    """A packer per thread that makes batches: one may collate, another send."""

    def __init__(self, arena: ArenaWriter, inline_bytes: int) -> None:
        self.packer = Packer(arena, inline_bytes)

    def lease(self, nbytes: int) -> Any:
        """Return memory in this thread's slot."""
        return self.packer.lease(nbytes)


def send_fatal(worker: int, ends: Ends, error: BaseException) -> None:
    """Report to the loader that a worker, still without an endpoint, cannot start."""
    send_error(FATAL, worker, ends, error)


def send_error(kind: int, worker: int, ends: Ends, error: BaseException) -> None:
    """Send an error that belongs to no request."""
    packer = Packer(ArenaWriter(ends.arena), _MOST_INLINE)
    parts = packer.pack(RemoteError.of(error, worker))
    head = result_head(kind, worker)
    Channel.adopt(ends.results).send(b"".join((head, *parts)))


class Endpoint:
    """The worker's side of its pool, for sync and async serving.

    Args:
        worker: Number of the worker.
        ends: Its descriptors.
        spec: What it does.
    """

    def __init__(self, worker: int, ends: Ends, spec: WorkerSpec) -> None:
        self.id = worker
        self._ends = ends
        self.spec = spec
        self._results = Channel.adopt(ends.results)
        self._table = InFlightTable(ends.table, spec.num_workers)
        self._samples = ArenaReader(ends.samples) if ends.samples >= 0 else None
        inline = min(_MOST_INLINE, _WAITING_BYTES // spec.in_flight)
        self._packers = _Packers(ArenaWriter(ends.arena), inline)
        self.maker = maker_of(
            spec,
            pool=self._packers,
            around=seeded,
            reseed=seed_batch,
            seed=seed_for_sample,
            at=use_sample_rng,
        )
        self._is_restored = not self.maker.keeps_state

    def lifespan(self) -> Lifespan:
        """Return the lifespan to enter before samples are read here."""
        if not self.spec.reads:
            return Lifespan(())
        return Lifespan(self.spec.dataset, self.spec.lifespan)

    def give_up(self, error: BaseException) -> NoReturn:
        """Make the loader end all iterations with ``error``, and end this worker."""
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            _end_process(error)
        self.send(FATAL, -1, RemoteError.of(error, self.id))
        raise SystemExit(1)

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Send what is raised at the end; print it if the loader does not wait."""
        try:
            yield
        except BaseException as error:  # of the user's code
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                name, pid = type(error).__name__, os.getpid()
                error = WorkerDiedError(
                    f"DataLoader worker (pid(s) {pid}) exited unexpectedly: {name} in "
                    "stage 'lifespan'",
                    pid=pid,
                )
            try:
                send_error(LEFT, self.id, self._ends, error)
            except OSError:
                sys.excepthook(type(error), error, error.__traceback__)

    def receive(self, requests: Channel) -> Request:
        """Return the next request.

        Raises:
            EOFError: If the loader is gone.
        """
        received = requests.receive()
        assert received is not None
        if self._samples is None:
            return Request.load(received[0])
        return Request._make(unpack(received[0], 0, self._samples))

    def take(self, request: Request, place: int) -> BatchTask:
        """Note that ``request`` was taken, and return its task."""
        self._table.begin(self.id, place, request.ticket)
        self.maker.epoch = request.epoch
        task = BatchTask(
            request.number,
            request.indices,
            request.key,
            request.sample_keys,
            request.padding,
            again=request.again,
        )
        if request.samples is not None:
            task.samples = request.samples
        if not self._is_restored:
            self._is_restored = True
            try:
                self._restore(request)
            except BaseException as error:  # of user code; handed to the consumer
                task.result = BatchResult(error=error)
        return task

    def _restore(self, request: Request) -> None:
        """Set a map-style dataset to its state before the first batch."""
        saved = self.spec.datasets
        if request.resume is not None:  # after a death
            self.maker.dataset.load_state_dict(*request.resume)
        elif self.id in saved:
            self.maker.dataset.load_state_dict(saved[self.id])

    def enter(self, stage: str, place: int = 0) -> None:
        """Note that the batch at ``place`` has reached ``stage``."""
        self._table.enter(self.id, place, _CODES[stage])

    def answer(
        self, task: BatchTask, ticket: int, place: int, result: BatchResult
    ) -> None:
        """Send the result of a request, and note that it is no longer in flight.

        Raises:
            OSError: If the loader is gone.
        """
        if isinstance(result.error, (KeyboardInterrupt, SystemExit)):
            _end_process(result.error)
        self.enter("send", place)
        result.state = task.state
        if result.dataset is not None:
            result.dataset = self.id, result.dataset[1]
        # Failures since the last result; the loader keeps the list and the budget.
        latest = self.maker.policy.latest
        failures = sendable(latest, self.id) if latest else []
        if self.maker.policy.retries:
            result.retries = self.maker.policy.take_retries()
        try:
            if failures or task.missing or not _is_just_a_batch(result):
                self._send_answer(ticket, result, failures, task)
            else:
                self.send(BATCH, ticket, result.batch, task.made())
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:  # not picklable, or too large
            error.add_note(f"aioloader: {self.maker.place('send', task)}")
            self._packers.packer.reset()
            refused = BatchResult(error=error, state=result.state)
            self._send_answer(ticket, refused, failures, task)
        self._table.clear(self.id, place)

    def send(self, kind: int, ticket: int, value: Any, made: Made = NOT_MADE) -> None:
        """Send one result."""
        parts = (
            result_head(kind, self.id, ticket, made),
            *self._packers.packer.pack(value),
        )
        if len(parts) <= MAX_PARTS:
            self._results.send_parts(parts)
        else:
            self._results.send(b"".join(parts))

    def _send_answer(
        self,
        ticket: int,
        result: BatchResult,
        failures: list[Failure],
        task: BatchTask,
    ) -> None:
        answer = Answer(
            result.batch,
            result.error and RemoteError.of(result.error, self.id),
            result.is_empty,
            result.is_end,
            failures,
            result.retries,
            result.state,
            result.dataset,
            missing=task.missing,
        )
        self.send(ANSWER, ticket, answer, task.made())


def _is_just_a_batch(result: BatchResult) -> bool:
    has_more = result.error or result.is_empty or result.is_end or result.retries
    return not has_more and result.state is result.dataset is None


def _end_process(error: BaseException) -> NoReturn:
    """End the worker, as ``error`` in its main thread would.

    Torch's worker ends the same way: the loader sees that it has died.
    """
    code = error.code if isinstance(error, SystemExit) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
