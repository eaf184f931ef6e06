"""Assign batches to worker processes: tickets, queues and workers of one pool.

A ticket is one request. It waits here until its queue has room, then in the kernel
until a worker takes it, and is removed when its result arrives. Synchronous; used under
the pool's lock. The dispatcher owns the descriptors for requests and batches.
"""

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.pipeline import Pipeline
from aioloader._transport.arena import ArenaReader, ArenaWriter, SlotRef, make_arena
from aioloader._transport.channel import NO_WAIT, Channel
from aioloader._transport.in_flight_table import PLACES
from aioloader._transport.slots import Locker
from aioloader._workers.process.batch_codec import Packer, slot_of
from aioloader._workers.process.messages import Request, forget
from aioloader._workers.worker_spec import WorkerSpec
from aioloader.protocols import is_stateful

if TYPE_CHECKING:
    from aioloader._workers.process.replicas import Replicas

# Samples of up to this size travel inside the request.
_INLINE_BYTES = 1 << 15


@dataclass(eq=False)
class Queue:
    """A queue of requests, for any free worker or for a certain one.

    Attributes:
        near: The sending end.
        far: The workers' end: passed to them, and used to take requests back.
        waiting: Tickets (numbers) and other frames that the kernel had no room for.
    """

    near: Channel
    far: Channel
    waiting: deque[int | bytes] = field(default_factory=deque)

    @classmethod
    def make(cls, stack: contextlib.ExitStack) -> "Queue":
        """Return a new, empty queue, which ``stack`` closes."""
        near, far = Channel.pair()
        stack.callback(far.close)  # workers then see the end of requests
        stack.callback(near.close)
        return cls(near.never_block(), far)

    def taken_back(self) -> Iterator[bytes | memoryview]:
        """Remove and yield the requests that no worker has taken."""
        while received := self.far.receive(NO_WAIT):
            yield received[0]


@dataclass(eq=False)
class Worker:
    """The loader's view of a worker; the process may change, the number stays.

    Attributes:
        own: Requests for this worker alone, if batches are assigned to workers.
        arena: The loader's side of the memory of its batches.
        pid: Its process, once known.
        is_ready: Whether the process takes requests.
        starts: Processes started since the last one that took a batch.
        answered: Its latest results: the ticket, and the slot of the samples.
        copy_state: A tuple of the state of its copy of a stateful map-style dataset,
            after its latest result; None if not known.
        has_new_copy: Whether its process has replaced a dead one and was not yet given
            ``copy_state``.
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
    copy_state: tuple[Any] | None = None
    has_new_copy: bool = False

    def lost_state(self) -> tuple[Any] | None:
        """Return the state to give to the dataset of a new process, if any."""
        return self.copy_state if self.has_new_copy else None


@dataclass(eq=False, slots=True)
class Ticket:
    """A request in flight.

    Attributes:
        worker: The worker that the batch is assigned to, if batches are.
        deaths: How many workers have died with this batch alone in hand.
        slot: The slot of its samples, if they did not fit into the request.
    """

    pipeline: Pipeline
    task: BatchTask
    request: Request
    worker: Worker
    deaths: int = 0
    slot: SlotRef | None = None


def _replicas(spec: WorkerSpec) -> "Replicas":
    from aioloader._workers.process.replicas import Replicas

    return Replicas(spec.num_workers, has_state=is_stateful(spec.dataset))


class Dispatcher:
    """Tickets, queues and workers of one pool.

    Args:
        spec: What the workers do.
        stack: Closes everything that is opened here.
        locker: Page-locks the memory that workers write batches to, or None.
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
        self._names = itertools.count()
        self._has_copies = spec.keeps_state
        self.replicas = _replicas(spec) if spec.is_stream() else None
        self.requests = Queue.make(stack)
        self.samples: ArenaWriter | None = None
        self._readers: dict[int, int] = {}  # slot of samples -> the latest ticket
        if not spec.reads:
            self.samples = ArenaWriter(make_arena())
            stack.callback(self.samples.close)
            self._packer = Packer(self.samples, _INLINE_BYTES)
        self.workers: list[Worker] = []
        for number in range(spec.num_workers):
            own = Queue.make(stack) if spec.is_addressed else None
            self.workers.append(Worker(number, own, self.new_arena()))
        stack.callback(self._close_arenas)
        self.queues = [self.requests]
        self.queues += [worker.own for worker in self.workers if worker.own is not None]

    def new_arena(self) -> ArenaReader:
        """Return an arena for a worker that is about to start."""
        return ArenaReader(make_arena(), self._locker)

    # -- requests -------------------------------------------------------------------

    def submit(self, pipeline: Pipeline, task: BatchTask) -> None:
        """Send a request for ``task``; a stream that has ended answers at once."""
        worker = self.workers[task.number % len(self.workers)]
        if self.replicas is not None and not task.again:
            early = self.replicas.result_of(pipeline, worker.number)
            if early is not None:
                pipeline.receive(task, early)
                return
        name = next(self._names)
        request = self._request(name, pipeline, task, worker)
        self.tickets[name] = Ticket(pipeline, task, request, worker)
        queue = worker.own or self.requests
        queue.waiting.append(name)
        self._flush(queue)

    def flush(self) -> None:
        """Send waiting requests while there is room."""
        for queue in self.queues:
            if queue.waiting:
                self._flush(queue)

    def _flush(self, queue: Queue) -> None:
        waiting = queue.waiting
        while waiting and self._is_sent(queue.near, waiting[0]):
            waiting.popleft()

    def _is_sent(self, near: Channel, item: int | bytes) -> bool:
        """Send one item; return False if there was no room."""
        if isinstance(item, bytes):
            return near.send(item)
        ticket = self.tickets.get(item)
        if ticket is None:
            return True
        try:
            frame = self._frame(ticket)
        except Exception as error:  # the user's classes may raise when pickled
            del self.tickets[item]
            result = BatchResult(error=error.with_traceback(None))
            ticket.pipeline.receive(ticket.task, result)
            return True
        is_sent = near.send(frame)
        if not is_sent:
            self.free_samples(item, ticket.slot)
        return is_sent

    def _request(
        self, name: int, pipeline: Pipeline, task: BatchTask, worker: Worker
    ) -> Request:
        number, indices = task.number, task.indices
        resume: Any = None
        if self.replicas is not None:
            number //= len(self.workers)
            part = self.spec.part
            whole = len(indices) * part.world_size
            indices = part.places(number * whole, (number + 1) * whole)
            state = self.replicas.ask(pipeline, worker.number, number)
            if state is not None:
                seeds = pipeline.maker.seeds(worker.number, len(self.workers))
                resume = state, seeds
        elif self._has_copies:
            resume = worker.lost_state()
        return Request(
            name,
            id(pipeline),
            pipeline.maker.epoch,
            number,
            indices,
            task.key,
            task.sample_keys,
            task.padding,
            None if self.spec.reads else task.samples,
            resume,
            task.again,
        )

    def _frame(self, ticket: Ticket) -> bytes:
        if self.samples is None:
            return ticket.request.dump()
        frame = b"".join(self._packer.pack(tuple(ticket.request)))
        ticket.slot = slot_of(frame, 0)
        if ticket.slot is not None:
            self._readers[ticket.slot.number] = ticket.request.ticket
        return frame

    # -- results --------------------------------------------------------------------

    def accept(
        self, worker: Worker, ticket: Ticket, result: BatchResult
    ) -> BatchResult:
        """Note a result whose ticket was removed; return the consumer's result."""
        worker.answered.append((ticket.request.ticket, ticket.slot))
        if self.replicas is not None:
            number = ticket.request.number
            return self.replicas.passed(ticket.pipeline, worker.number, result, number)
        if self._has_copies:
            worker.has_new_copy = False
            if result.dataset is not None:
                worker.copy_state = (result.dataset[1],)
        return result

    def forget(self, pipeline: Pipeline) -> None:
        """Remove the requests of ``pipeline``."""
        for name, ticket in list(self.tickets.items()):
            if ticket.pipeline is pipeline:
                del self.tickets[name]
        if self.replicas is not None:
            self.replicas.forget(pipeline)
        if self.spec.reads:
            for queue in self.queues[1:]:
                queue.waiting.append(forget(id(pipeline)))
            self.flush()

    # -- after the death of a worker --------------------------------------------------

    def lose_copy(self, dead: Worker) -> None:
        """Give the successor's dataset the state of the dead worker's."""
        dead.has_new_copy = self._has_copies
        for ticket in self.tickets.values():
            if dead.has_new_copy and ticket.worker is dead:
                ticket.request = ticket.request._replace(resume=dead.copy_state)

    def free_samples(self, name: int, slot: SlotRef | None) -> None:
        """Free the memory of a ticket's samples that no worker will read.

        A worker may have read and freed them, and the slot may hold other samples now.
        """
        if self.samples is None or slot is None:
            return
        if self._readers.get(slot.number) == name:
            del self._readers[slot.number]
            self.samples.give_back(slot)

    def free_answered(self, dead: Worker) -> None:
        """Free the samples of latest results that a dead worker still held."""
        for name, slot in dead.answered:
            self.free_samples(name, slot)
        dead.answered.clear()

    def take_back(self, queue: Queue) -> None:
        """Empty a queue, in the kernel and here; keep the tickets."""
        for frame in queue.taken_back():
            slot = slot_of(frame, 0) if self.samples is not None else None
            if slot is not None:
                self.free_samples(self._readers.get(slot.number, -1), slot)
        queue.waiting.clear()

    def close(self) -> None:
        """Remove everything and close the queues of requests."""
        self.tickets.clear()
        self.replicas = None  # it would keep pipelines alive
        for queue in self.queues:
            self.take_back(queue)

    def _close_arenas(self) -> None:
        for worker in self.workers:
            worker.arena.close()
