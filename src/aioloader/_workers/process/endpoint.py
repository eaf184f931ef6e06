"""A worker's endpoint: what it takes in hand, and how it sends what came of it."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from aioloader._order.failures import Failure, FailurePolicy
from aioloader._pipeline.batch_maker import BatchMaker
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.lifespan import Lifespan
from aioloader._transport.arena import ArenaReader, ArenaWriter
from aioloader._transport.channel import Channel
from aioloader._transport.in_flight_table import InFlightTable
from aioloader._workers.info import be_at_sample
from aioloader._workers.process.batch_codec import Packer, unpack
from aioloader._workers.process.messages import (
    RESULT_HEAD,
    Answer,
    Kind,
    Request,
    sendable,
)
from aioloader._workers.remote_error import RemoteError
from aioloader._workers.rng_streams import Seeded, seed_batch, seed_for_sample
from aioloader._workers.worker_spec import WorkerSpec

# What may wait in the socket of results, in bytes: a share for each batch in flight.
_WAITING_BYTES = 1 << 20
_MOST_INLINE = (1 << 16) - 1024
FETCH, TRANSFORM, COLLATE, SEND = range(4)


@dataclass(frozen=True)
class Ends:
    """Descriptors that a worker is given; -1 for one that it has no use for.

    Attributes:
        requests: Where it takes requests, shared with the other workers.
        own: Where it takes requests that are for it alone.
        results: Where it sends results, shared too.
        board: Where it notes what it has in hand.
        stacks: Where ``faulthandler`` writes its stack when asked.
        arena: The memory for its batches.
        samples: The memory of samples that the loader has read.
    """

    requests: int
    own: int
    results: int
    board: int
    stacks: int
    arena: int
    samples: int


class _Packers(threading.local):
    """A packer for each thread that makes batches: one may collate, another send."""

    def __init__(self, arena: ArenaWriter, inline_bytes: int) -> None:
        self.packer = Packer(arena, inline_bytes)

    def lease(self, nbytes: int) -> Any:
        """Return memory of this thread's slot."""
        return self.packer.lease(nbytes)


def send_fatal(worker: int, ends: Ends, error: BaseException) -> None:
    """Tell the loader, from a worker without a endpoint, that it cannot begin."""
    packer = Packer(ArenaWriter(ends.arena), _MOST_INLINE)
    parts = packer.pack(RemoteError.of(error, worker))
    head = RESULT_HEAD.pack(Kind.FATAL, worker, -1)
    Channel.adopt(ends.results).send(b"".join((head, *parts)))


class Endpoint:
    """What all ways of serving share.

    Args:
        worker: Number of the worker.
        ends: Its descriptors.
        spec: What it is to do.
    """

    def __init__(self, worker: int, ends: Ends, spec: WorkerSpec) -> None:
        self.id = worker
        self.spec = spec
        self._results = Channel.adopt(ends.results)
        self._board = InFlightTable(ends.board, spec.num_workers)
        self._samples = ArenaReader(ends.samples) if ends.samples >= 0 else None
        inline = min(_MOST_INLINE, _WAITING_BYTES // spec.in_flight)
        self._packers = _Packers(ArenaWriter(ends.arena), inline)
        self._policy = FailurePolicy(spec.on_error)
        self.maker = BatchMaker(
            spec.dataset if spec.reads else (),
            spec.transform,
            spec.collate_fn,
            batched=spec.batched,
            policy=self._policy,
            retry=spec.retry,
            pool=self._packers,
            reads=spec.reads,
            around=Seeded,
            reseed=seed_batch,
            seed=seed_for_sample,
            at=be_at_sample,
            part=spec.part,
            snapshot_every=spec.snapshot_every,
            keeps_step=spec.keeps_step,
        )
        self._is_restored = not self.maker.keeps_state

    def lifespan(self) -> Lifespan:
        """Return what is to be entered before samples are read here."""
        if not self.spec.reads:
            return Lifespan(())
        return Lifespan(self.spec.dataset, self.spec.lifespan)

    def give_up(self, error: BaseException) -> NoReturn:
        """Have the loader end all iterations with ``error``, and end this worker."""
        self.send(Kind.FATAL, -1, RemoteError.of(error, self.id))
        raise SystemExit(1)

    @contextlib.contextmanager
    def printing(self) -> Iterator[None]:
        """Print what is raised at the end: the loader listens no more."""
        try:
            yield
        except Exception:  # of the user's code
            sys.excepthook(*sys.exc_info())

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
        """Note that ``request`` is in hand, and return its task."""
        self._board.begin(self.id, place, request.ticket)
        self.maker.epoch = request.epoch
        keys = request.key, request.sample_keys
        task = BatchTask(request.number, request.indices, *keys, request.padding)
        if request.samples is not None:
            task.samples = request.samples
        return task

    def restore(self, request: Request) -> None:
        """Set a map-style dataset to the state that its first batch is to find."""
        if self._is_restored:
            return
        self._is_restored = True
        saved = self.spec.datasets
        if request.resume is not None:  # after a death
            self.maker.dataset.load_state_dict(*request.resume)
        elif self.id in saved:
            self.maker.dataset.load_state_dict(saved[self.id])

    def enter(self, stage: int, place: int = 0) -> None:
        """Note the stage that what is in hand has come to."""
        self._board.enter(self.id, place, stage)

    def answer(
        self, task: BatchTask, ticket: int, place: int, result: BatchResult
    ) -> None:
        """Send what came of a request, and note that it is no longer in hand.

        Raises:
            OSError: If the loader is gone.
        """
        self.enter(SEND, place)
        # Those since the last result; the loader keeps the list and the budget.
        failures = sendable(self._policy.latest, self.id)
        result.state = task.state
        if result.dataset is not None:
            result.dataset = self.id, result.dataset[1]
        try:
            self._send_result(ticket, result, failures)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:  # it cannot be pickled, or is too large
            error.add_note(f"aioloader: {self.maker.place('send', task)}")
            self._packers.packer.reset()
            again = BatchResult(error=error, state=result.state)
            self._send_result(ticket, again, failures)
        self._board.clear(self.id, place)

    def send(self, kind: Kind, ticket: int, value: Any) -> None:
        """Send one result."""
        parts = self._packers.packer.pack(value)
        self._results.send(b"".join((RESULT_HEAD.pack(kind, self.id, ticket), *parts)))

    def _send_result(
        self, ticket: int, result: BatchResult, failures: list[Failure]
    ) -> None:
        is_else = result.error or result.is_empty or result.is_end or failures
        if not is_else and result.state is result.dataset is None:
            self.send(Kind.BATCH, ticket, result.batch)
            return
        error = result.error and RemoteError.of(result.error, self.id)
        answer = Answer(
            result.batch,
            error,
            result.is_empty,
            result.is_end,
            failures,
            result.state,
            result.dataset,
        )
        self.send(Kind.OUTCOME, ticket, answer)
