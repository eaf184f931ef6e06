"""What is under way in a pool: tickets, the queues they wait in, and for whom.

A ticket is one request. It waits here until its queue has room, then in the kernel
until a worker takes it, and is struck out when its result has come. It owns the
descriptors that requests need.
"""

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.pipeline import Pipeline
from aioloader._transport.arena import ArenaReader, ArenaWriter, SlotRef, make_arena
from aioloader._transport.channel import NO_WAIT, Channel
from aioloader._transport.in_flight_table import PLACES
from aioloader._transport.locked import Locker
from aioloader._workers.process.batch_codec import Packer, slot_of
from aioloader._workers.process.copies import Copies
from aioloader._workers.process.messages import FORGET, Request
from aioloader._workers.process.replicas import Replicas
from aioloader._workers.worker_spec import WorkerSpec
from aioloader.protocols import is_stateful

# Samples of up to this size travel inside the request.
_INLINE_BYTES = 1 << 15


@dataclass(eq=False)
class Queue:
    """Requests on their way: to whichever worker is free, or to a certain one.

    Attributes:
        near: The end that sends.
        far: A copy of the workers' end: to pass on, and to take requests back from.
        waiting: Tickets for which there was no room yet, and runs to be forgotten
            (frames).
    """

    near: Channel
    far: Channel
    waiting: deque[int | bytes] = field(default_factory=deque)

    @classmethod
    def make(cls) -> "Queue":
        """Return a new, empty queue."""
        near, far = Channel.pair()
        return cls(near.never_block(), far)

    def taken_back(self) -> Iterator[bytes]:
        """Remove and yield the requests that no worker has taken."""
        while received := self.far.receive(NO_WAIT):
            yield received[0]

    def close(self) -> None:
        """Close both ends: workers see that there is nothing more."""
        self.near.close()
        self.far.close()


@dataclass(eq=False)
class Worker:
    """A worker as the loader knows it; the process may change, the number stays.

    Attributes:
        own: Requests for it alone, where there are such.
        arena: The loader's side of its batches' memory.
        pid: Its process, once that is known.
        is_ready: Whether the process takes requests.
        starts: How many processes it has cost since it last had a batch in hand.
        answered: Its latest results: the ticket, and where its samples were.
    """

    number: int
    own: Queue | None
    arena: ArenaReader
    pid: int | None = None
    is_ready: bool = False
    starts: int = 0
    answered: deque[tuple[int, SlotRef | None]] = field(
        default_factory=lambda: deque(maxlen=PLACES)
    )


@dataclass(eq=False, slots=True)
class Ticket:
    """A request under way.

    Attributes:
        worker: Whom it is for, where requests are addressed.
        deaths: How many workers have died with it in hand.
        slot: Where its samples are, if they did not fit into the request.
    """

    run: Pipeline
    task: BatchTask
    request: Request
    worker: Worker
    deaths: int = 0
    slot: SlotRef | None = None


class Dispatcher:
    """Tickets, queues and workers of one pool; used under the pool's lock.

    Args:
        spec: What the workers are to do.
        stack: Closes what is opened here.
        locker: Page-locks what workers write batches into, or None.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        stack: contextlib.ExitStack,
        locker: Locker | None = None,
    ) -> None:
        self.spec = spec
        self._locker = locker
        self.tickets: dict[int, Ticket] = {}
        self._next = 0
        number, is_addressed = spec.num_workers, spec.is_addressed()
        self.is_replicated = spec.is_replicated()
        self.replicas = Replicas(
            number if self.is_replicated else 0,
            has_state=is_stateful(spec.dataset),
        )
        self.is_addressed = is_addressed
        self.copies = Copies() if spec.has_copies() else None
        self.requests = self._queue(stack)
        self.samples: ArenaWriter | None = None
        self._readers: dict[int, int] = {}  # by slot of samples: the latest ticket
        if not spec.reads:
            self.samples = ArenaWriter(make_arena())
            stack.callback(self.samples.close)
            self._packer = Packer(self.samples, _INLINE_BYTES)
        self.workers: list[Worker] = []
        for place in range(number):
            own = self._queue(stack) if is_addressed else None
            worker = Worker(place, own, self.new_arena())
            stack.callback(_close_arena, worker)
            self.workers.append(worker)

    def new_arena(self) -> ArenaReader:
        """Return an arena for a worker that is about to be started."""
        return ArenaReader(make_arena(), self._locker)

    def enter(self, run: Pipeline, task: BatchTask) -> int:
        """Write a ticket for ``task``; return its name."""
        name, self._next = self._next, self._next + 1
        worker = self.workers[task.number % len(self.workers)]
        request = self._request(name, run, task)
        self.tickets[name] = Ticket(run, task, request, worker)
        return name

    def queue_of(self, name: int) -> Queue:
        """Return where a ticket waits."""
        own = self.tickets[name].worker.own
        return own if self.is_addressed and own is not None else self.requests

    def flush(self) -> None:
        """Send requests, as far as there is room for them."""
        own = [worker.own for worker in self.workers if worker.own is not None]
        for queue in (self.requests, *own):
            waiting = queue.waiting
            while waiting and self._is_sent(queue.near, waiting[0]):
                waiting.popleft()

    def _is_sent(self, near: Channel, item: int | bytes) -> bool:
        """Send what waits; tell whether there was room for it, or nobody wants it."""
        if isinstance(item, bytes):
            return near.send(item)
        ticket = self.tickets.get(item)
        if ticket is None:
            return True
        try:
            frame = self._frame(ticket)
        except Exception as error:  # what the user's classes raise when pickled
            del self.tickets[item]
            ticket.run.receive(
                ticket.task, BatchResult(error=error.with_traceback(None))
            )
            return True
        is_sent = near.send(frame)
        if not is_sent:
            self.free_samples(item, ticket.slot)
        return is_sent

    def forget(self, run: Pipeline) -> None:
        """Strike out what ``run`` still waits for."""
        for name, ticket in list(self.tickets.items()):
            if ticket.run is run:
                del self.tickets[name]
        self.replicas.forget(run)
        if self.spec.reads:
            frame = FORGET._replace(run=id(run)).dump()
            for worker in self.workers:
                if worker.own is not None:
                    worker.own.waiting.append(frame)
            self.flush()

    def free_samples(self, name: int, slot: SlotRef | None) -> None:
        """Take back the memory of a ticket's samples that nobody will read.

        Who has read them may have freed it before, and others may be there now.
        """
        if self.samples is None or slot is None:
            return
        if self._readers.get(slot.number) == name:
            del self._readers[slot.number]
            self.samples.give_back(slot)

    def free_answered(self, dead: Worker) -> None:
        """Take back what a worker still held of its latest results when it died."""
        for name, slot in dead.answered:
            self.free_samples(name, slot)
        dead.answered.clear()

    def take_back(self, queue: Queue) -> None:
        """Empty a queue, in the kernel and here; the tickets stay."""
        for frame in queue.taken_back():
            slot = slot_of(frame, 0) if self.samples is not None else None
            if slot is not None:
                self.free_samples(self._readers.get(slot.number, -1), slot)
        queue.waiting.clear()

    def close(self) -> None:
        """Strike out everything, and let workers find no more requests."""
        self.tickets.clear()
        self.replicas = Replicas(0)  # it would keep iterations
        for queue in (self.requests, *(worker.own for worker in self.workers)):
            if queue is not None:
                self.take_back(queue)

    def _queue(self, stack: contextlib.ExitStack) -> Queue:
        queue = Queue.make()
        stack.callback(queue.close)
        return queue

    def _request(self, name: int, run: Pipeline, task: BatchTask) -> Request:
        number, indices, samples = task.number, task.indices, None
        resume: Any = None
        if not self.spec.reads:
            samples = task.samples
        elif self.is_replicated:
            number, worker = divmod(number, len(self.workers))
            whole = len(indices) * self.spec.part.world_size
            indices = self.spec.part.places(number * whole, (number + 1) * whole)
            state = self.replicas.ask(run, worker, number)
            if state is not None:
                resume = state, run.maker.seeds(worker, len(self.workers))
        elif self.copies is not None:
            resume = self.copies.lost_by(number % len(self.workers))
        return Request(
            ticket=name,
            run=id(run),
            epoch=run.maker.epoch,
            number=number,
            key=task.key,
            sample_keys=task.sample_keys,
            is_alone=False,
            indices=indices,
            samples=samples,
            padding=task.padding,
            resume=resume,
        )

    def _frame(self, ticket: Ticket) -> bytes:
        if self.samples is None:
            return ticket.request.dump()
        frame = b"".join(self._packer.pack(tuple(ticket.request)))
        ticket.slot = slot_of(frame, 0)
        if ticket.slot is not None:
            self._readers[ticket.slot.number] = ticket.request.ticket
        return frame


def _close_arena(worker: Worker) -> None:
    worker.arena.close()
