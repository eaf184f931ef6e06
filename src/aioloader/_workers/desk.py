"""A worker's desk: what it takes in hand, and how it sends what came of it."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from aioloader._order.failures import Failure, FailurePolicy
from aioloader._pipeline.lifespan import Lifespan
from aioloader._pipeline.recipe import Recipe
from aioloader._pipeline.work import Outcome, Work
from aioloader._transport.arena import ArenaReader, ArenaWriter
from aioloader._transport.board import Board
from aioloader._transport.channel import Channel
from aioloader._workers.info import be_at_sample
from aioloader._workers.keyed import Seeded, seed_batch, seed_for_sample
from aioloader._workers.messages import RESULT_HEAD, Answer, Kind, Request, sendable
from aioloader._workers.parcel import Packer, unpack
from aioloader._workers.remote import RemoteError
from aioloader._workers.shipment import Shipment

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
    """Tell the loader, from a worker without a desk, that it cannot begin."""
    packer = Packer(ArenaWriter(ends.arena), _MOST_INLINE)
    parts = packer.pack(RemoteError.of(error, worker))
    head = RESULT_HEAD.pack(Kind.FATAL, worker, -1)
    Channel.adopt(ends.results).send(b"".join((head, *parts)))


class Desk:
    """What all ways of serving share.

    Args:
        worker: Number of the worker.
        ends: Its descriptors.
        shipment: What it is to do.
    """

    def __init__(self, worker: int, ends: Ends, shipment: Shipment) -> None:
        self.id = worker
        self.shipment = shipment
        self._results = Channel.adopt(ends.results)
        self._board = Board(ends.board, shipment.num_workers)
        self._samples = ArenaReader(ends.samples) if ends.samples >= 0 else None
        inline = min(_MOST_INLINE, _WAITING_BYTES // shipment.in_flight)
        self._packers = _Packers(ArenaWriter(ends.arena), inline)
        self._policy = FailurePolicy(shipment.on_error)
        self.recipe = Recipe(
            shipment.dataset if shipment.reads else (),
            shipment.transform,
            shipment.collate_fn,
            batched=shipment.batched,
            policy=self._policy,
            retry=shipment.retry,
            pool=self._packers,
            reads=shipment.reads,
            around=Seeded,
            reseed=seed_batch,
            seed=seed_for_sample,
            at=be_at_sample,
            part=shipment.part,
            snapshot_every=shipment.snapshot_every,
            keeps_step=shipment.keeps_step,
        )
        self._is_restored = not self.recipe.keeps_state

    def lifespan(self) -> Lifespan:
        """Return what is to be entered before samples are read here."""
        if not self.shipment.reads:
            return Lifespan(())
        return Lifespan(self.shipment.dataset, self.shipment.lifespan)

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

    def take(self, request: Request, place: int) -> Work:
        """Note that ``request`` is in hand, and return its work."""
        self._board.begin(self.id, place, request.ticket)
        self.recipe.epoch = request.epoch
        keys = request.key, request.sample_keys
        work = Work(request.number, request.indices, *keys, request.padding)
        if request.samples is not None:
            work.samples = request.samples
        return work

    def restore(self, request: Request) -> None:
        """Set a map-style dataset to the state that its first batch is to find."""
        if self._is_restored:
            return
        self._is_restored = True
        saved = self.shipment.datasets
        if request.resume is not None:  # after a death
            self.recipe.dataset.load_state_dict(*request.resume)
        elif self.id in saved:
            self.recipe.dataset.load_state_dict(saved[self.id])

    def enter(self, stage: int, place: int = 0) -> None:
        """Note the stage that what is in hand has come to."""
        self._board.enter(self.id, place, stage)

    def answer(self, work: Work, ticket: int, place: int, outcome: Outcome) -> None:
        """Send what came of a request, and note that it is no longer in hand.

        Raises:
            OSError: If the loader is gone.
        """
        self.enter(SEND, place)
        # Those since the last result; the loader keeps the list and the budget.
        failures = sendable(self._policy.latest, self.id)
        outcome.state = work.state
        if outcome.dataset is not None:
            outcome.dataset = self.id, outcome.dataset[1]
        try:
            self._send_outcome(ticket, outcome, failures)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:  # it cannot be pickled, or is too large
            error.add_note(f"aioloader: {self.recipe.place('send', work)}")
            self._packers.packer.reset()
            again = Outcome(error=error, state=outcome.state)
            self._send_outcome(ticket, again, failures)
        self._board.clear(self.id, place)

    def send(self, kind: Kind, ticket: int, value: Any) -> None:
        """Send one result."""
        parts = self._packers.packer.pack(value)
        self._results.send(b"".join((RESULT_HEAD.pack(kind, self.id, ticket), *parts)))

    def _send_outcome(
        self, ticket: int, outcome: Outcome, failures: list[Failure]
    ) -> None:
        is_else = outcome.error or outcome.is_empty or outcome.is_end or failures
        if not is_else and outcome.state is outcome.dataset is None:
            self.send(Kind.BATCH, ticket, outcome.batch)
            return
        error = outcome.error and RemoteError.of(outcome.error, self.id)
        answer = Answer(
            outcome.batch,
            error,
            outcome.is_empty,
            outcome.is_end,
            failures,
            outcome.state,
            outcome.dataset,
        )
        self.send(Kind.OUTCOME, ticket, answer)
