"""Assign batches to worker processes: tickets, queues and workers of one pool.

A ticket is one request. It waits here until its queue has room, then in the kernel
until a worker takes it, and is removed when its result arrives. Synchronous; used under
the pool's lock. The dispatcher owns the descriptors for requests and batches.
"""

import contextlib
import itertools
import pickle
from collections import deque
from dataclasses import dataclass
from typing import Any

from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.pipeline import Pipeline
from aioloader._transport.arena import ArenaReader, ArenaWriter, SlotRef, make_arena
from aioloader._transport.channel import NO_WAIT, Channel
from aioloader._transport.slots import Locker
from aioloader._workers.process.messages import Packer, Request, slot_of
from aioloader._workers.process.replicas import Replicas
from aioloader._workers.worker_spec import WorkerSpec
from aioloader.protocols import is_stateful

# Samples of up to this size travel inside the request.
_INLINE_BYTES = 1 << 15


class Queue:
    """A queue of requests, for any free worker or for a certain one."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        # The far end is passed to workers, and used to take requests back.
        self.near, self.far = Channel.pair()
        # Tickets (numbers) and other frames that the kernel had no room for.
        self.waiting: deque[int | bytes] = deque()
        stack.callback(self.far.close)  # workers then see the end of requests
        stack.callback(self.near.close)


@dataclass(eq=False)
class Worker:
    """The loader's view of a worker; the process may change, the number stays.

    Attributes:
        queue: Its requests: for it alone, if batches are assigned to workers.
        arena: The loader's side of the memory of its batches.
        pid: Its process, once known.
        is_ready: Whether the process takes requests.
        starts: Processes started since the last one that took a batch.
        copy_state: A tuple of the state of its copy of a stateful map-style dataset,
            after its latest result; None if not known.
        has_new_copy: Whether its process has replaced a dead one and was not yet given
            ``copy_state``.
    """

    number: int
    queue: Queue
    arena: ArenaReader
    pid: int | None = None
    is_ready: bool = False
    starts: int = 0
    copy_state: tuple[Any] | None = None
    has_new_copy: bool = False


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


class Dispatcher:
    """Tickets, queues and workers of one pool; ``stack`` closes what it opens."""

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
        self.replicas: Replicas | None = None
        if spec.is_stream():
            has_state = is_stateful(spec.dataset)
            self.replicas = Replicas(spec.num_workers, has_state=has_state)
        self.samples: ArenaWriter | None = None
        # Who may read a slot of samples: any worker with this ticket, or the worker
        # that has answered it.
        self._readers: dict[SlotRef, int | Worker] = {}
        if not spec.reads:
            self.samples = ArenaWriter(make_arena())
            stack.callback(self.samples.close)
            self._packer = Packer(self.samples, _INLINE_BYTES)
        count = spec.num_workers if spec.is_addressed else 1
        self.queues = [Queue(stack) for _ in range(count)]
        self.workers: list[Worker] = []
        for number in range(spec.num_workers):
            arena = ArenaReader(make_arena(), locker)
            self.workers.append(Worker(number, self.queues[number % count], arena))
        stack.callback(self._close_arenas)

    def renew(self, worker: Worker) -> None:
        worker.arena.close()
        worker.arena = ArenaReader(make_arena(), self._locker)
        worker.pid, worker.is_ready = None, False

    # -- requests -------------------------------------------------------------------

    def submit(self, pipeline: Pipeline, task: BatchTask) -> None:
        """Send a request for ``task``; a stream that has ended answers at once."""
        worker = self.workers[task.number % len(self.workers)]
        if self.replicas is not None and not task.again:
            early = self.replicas.result_of(pipeline, worker.number)
            if early is not None:
                pipeline.receive(task, early)
                return
        number, indices, resume = task.number, task.indices, None
        if self.replicas is not None:
            number //= len(self.workers)
            part = self.spec.part
            whole = len(indices) * part.world_size
            indices = part.places(number * whole, (number + 1) * whole)
            resume = self.replicas.ask(pipeline, worker.number, number)
        elif worker.has_new_copy:
            resume = worker.copy_state
        asked: tuple[Any, ...]
        asked = number, indices, task.key, task.sample_keys, task.padding
        if not self.spec.reads:
            asked += (task.samples,)
        name, epoch = next(self._names), pipeline.maker.epoch
        request = Request(name, id(pipeline), epoch, asked, task.again, resume)
        self.tickets[name] = Ticket(pipeline, task, request, worker)
        worker.queue.waiting.append(name)
        self.flush(worker.queue)

    def flush(self, *queues: Queue) -> None:
        """Send waiting requests (of all queues by default) while there is room."""
        for queue in queues or self.queues:
            waiting = queue.waiting
            while waiting and self._is_sent(queue.near, waiting[0]):
                waiting.popleft()

    def _is_sent(self, near: Channel, item: int | bytes) -> bool:
        if isinstance(item, bytes):
            return near.send(item)
        ticket = self.tickets.get(item)
        if ticket is None:
            return True
        request, slot = tuple(ticket.request), None
        try:
            if self.samples is None:
                frame = pickle.dumps(request, 5)
            else:
                frame = b"".join(self._packer.pack(request))
                slot = slot_of(frame, 0)
        except Exception as error:  # the user's classes may raise when pickled
            del self.tickets[item]
            result = BatchResult(error=error.with_traceback(None))
            ticket.pipeline.receive(ticket.task, result)
            return True
        ticket.slot = slot
        if slot is not None:
            self._readers[slot] = item
        is_sent = near.send(frame)
        if not is_sent:
            self.free_samples(slot, item)
        return is_sent

    # -- results --------------------------------------------------------------------

    def accept(
        self, worker: Worker, ticket: Ticket, result: BatchResult
    ) -> BatchResult:
        """Note a worker's result; return it as the consumer sees it."""
        slot, request = ticket.slot, ticket.request
        if slot is not None and self._readers.get(slot) == request.ticket:
            self._readers[slot] = worker
        if self.replicas is not None:
            number = request.asked[0]
            return self.replicas.passed(ticket.pipeline, worker.number, result, number)
        if self._has_copies:
            worker.has_new_copy = False
            if result.dataset is not None:
                worker.copy_state = (result.dataset[1],)
        return result

    def forget(self, pipeline: Pipeline) -> None:
        for name, ticket in list(self.tickets.items()):
            if ticket.pipeline is pipeline:
                del self.tickets[name]
        if self.replicas is not None:
            self.replicas.forget(pipeline)
            frame = pickle.dumps(tuple(Request(-1, id(pipeline))), 5)
            for queue in self.queues:
                queue.waiting.append(frame)
            self.flush()

    # -- after the death of a worker --------------------------------------------------

    def lose_copy(self, dead: Worker) -> None:
        """Give the successor's dataset the state of the dead worker's."""
        dead.has_new_copy = self._has_copies
        for ticket in self.tickets.values():
            if dead.has_new_copy and ticket.worker is dead:
                ticket.request = ticket.request._replace(resume=dead.copy_state)

    def free_samples(self, slot: SlotRef | None, reader: int | Worker | None) -> None:
        """Free memory of samples that no worker will read.

        A worker may have read and freed them, and the slot may hold other samples now.
        """
        known = None if slot is None else self._readers.get(slot)
        if slot is not None and known is not None and known == reader:
            assert self.samples is not None
            del self._readers[slot]
            self.samples.give_back(slot)

    def free_answered(self, dead: Worker) -> None:
        """Free the samples of its results that a dead worker may still have held."""
        for slot in list(self._readers):
            self.free_samples(slot, dead)

    def take_back(self, queue: Queue) -> None:
        """Empty a queue, in the kernel and here; keep the tickets."""
        while received := queue.far.receive(NO_WAIT):
            slot = slot_of(received[0], 0) if self.samples is not None else None
            if slot is not None:
                self.free_samples(slot, self._readers.get(slot))
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
