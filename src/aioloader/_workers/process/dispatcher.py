"""Assign the batches of one pool to its worker processes.

A ticket represents one request. The request waits here until its queue has room, then
in the queue until a worker takes it. The ticket is removed when the result arrives. All
code is synchronous and runs under the pool's lock.
"""

import abc
import contextlib
import itertools
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aioloader._base.failures import Failure
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.pipeline import RUN_SECONDS, Pipeline
from aioloader._transport.arena import ArenaWriter, SlotRef
from aioloader._transport.channel import NO_WAIT, Channel
from aioloader._transport.codec import encode, encode_portable
from aioloader._workers.process.messages import (
    BATCH,
    FATAL,
    READY,
    RESULT_HEAD,
    WAITING_BYTES,
    Packer,
    Request,
    slot_of,
    unpack,
)
from aioloader._workers.process.replicas import StreamReplicas
from aioloader._workers.reducers import REDUCERS
from aioloader._workers.remote_tasks import of_both, opened, unopened
from aioloader._workers.worker_spec import WorkerSpec
from aioloader.protocols import is_stateful

# Samples up to this many bytes in total are sent inside the request.
_INLINE_BYTES = 1 << 15
# Besides those in flight, how many batches a consumer may hold before it gets copies.
_MAX_HELD = 4


class Queue(abc.ABC):
    """A queue of requests, for any free worker or for one particular worker."""

    waiting: deque[Request]  # requests for which there was no room

    @abc.abstractmethod
    def send(self, ticket: int, frame: bytes) -> bool:
        """Send a ticket's request if there is room; return whether it was sent."""

    def close(self) -> None:  # noqa: B027  (some end with their processes)
        """Close the queue, so that workers see the end of requests."""

    def taken(self) -> set[int]:
        """Return the tickets of requests that live workers are known to hold."""
        return set()

    def take_back(self) -> Iterator[bytes | memoryview]:
        """Remove and yield the requests that no worker has taken yet."""
        yield from ()


@dataclass(eq=False, repr=False)
class KernelQueue(Queue):
    """A queue in the kernel, from which workers take requests themselves."""

    # Workers get the second end; the loader takes requests back from it.
    ends: tuple[Channel, Channel] = field(default_factory=Channel.pair)
    waiting: deque[Request] = field(default_factory=deque)

    def send(self, ticket: int, frame: bytes) -> bool:  # noqa: ARG002  (for others)
        return self.ends[0].send_frame(frame)

    def close(self) -> None:
        for end in self.ends:
            end.close()

    def take_back(self) -> Iterator[bytes | memoryview]:
        while received := self.ends[1].receive_frame(NO_WAIT):
            yield received[0]


@dataclass(eq=False, repr=False)
class Worker:
    """The loader's record of one worker, whose process may be replaced."""

    number: int
    queue: Any  # a ``Queue``: this worker's, if batches are assigned, else shared
    arena: Any  # the memory of its batches, and the table of those in flight
    pid: int | None = None  # of its process, once known
    is_ready: bool = False  # whether the process takes requests
    starts: int = 0  # processes started since the last one that took a batch
    is_stuck: bool = False  # whether its process was killed because a batch was late
    # In a tuple: the state of its copy of a stateful map-style dataset after its latest
    # result. None: not known.
    copy_state: tuple[Any] | None = None
    # Whether its process replaces a dead one and must still get ``copy_state``.
    has_new_copy: bool = False


@dataclass(eq=False, repr=False, slots=True)
class Ticket:
    """A request, from its submission until its result arrives."""

    pipeline: Pipeline
    task: BatchTask
    request: Request
    worker: Worker  # the worker that gets the batch, if batches are assigned
    deaths: int = 0  # how many workers have died with this batch alone in hand
    slot: SlotRef | None = None  # where its samples are, if not inside the request


def _dumps_for_others(request: tuple[Any, ...]) -> bytes:
    return encode_portable(request, REDUCERS, sys.maxsize)[0]


_dumps: Callable[[tuple[Any, ...]], bytes] = partial(pickle.dumps, protocol=5)


class Dispatcher:
    """The tickets, queues and workers of one pool.

    ``make_queue`` and ``make_arena`` create queues and arenas; ``stack`` closes them.
    With ``has_memory``, samples that the loader reads also go through shared memory.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        stack: contextlib.ExitStack,
        make_queue: Callable[[], Queue],
        make_arena: Callable[[], Any],
        *,
        are_forks: bool = True,
        has_memory: bool = True,
    ) -> None:
        self.spec = spec
        # Forks of this process can import all of its modules.
        self._dumps = _dumps if are_forks else _dumps_for_others
        self._make_arena = make_arena
        self.tickets: dict[int, Ticket] = {}
        self._names = itertools.count()
        self._has_copies = spec.keeps_state
        self.replicas: StreamReplicas | None = None
        if spec.is_stream():
            has_state = is_stateful(spec.dataset)
            self.replicas = StreamReplicas(spec.num_workers, has_state=has_state)
        self.samples: ArenaWriter | None = None
        # The reader of the samples in each slot: the ticket of their request or, once
        # that is answered, the worker that has answered.
        self._readers: dict[SlotRef, int | Worker] = {}
        if has_memory and not spec.reads:
            self.samples = ArenaWriter()
            stack.callback(self.samples.close)
            to_header = encode if are_forks else encode_portable
            self._packer = Packer(self.samples, _INLINE_BYTES, to_header)
        self.queues: list[Queue] = []
        for _ in range(spec.num_workers if spec.is_addressed else 1):
            self.queues.append(make_queue())
            stack.callback(self.queues[-1].close)
        self.workers: list[Worker] = []
        for number in range(spec.num_workers):
            queue = self.queues[number % len(self.queues)]
            worker = Worker(number, queue, make_arena())
            stack.callback(lambda own: own.arena.close(), worker)
            self.workers.append(worker)

    def submit(self, pipeline: Pipeline, task: BatchTask) -> None:
        """Send or queue a request, or deliver the result if the stream has ended."""
        worker = self.workers[task.number % len(self.workers)]
        number, indices, resume = task.number, task.indices, None
        if self.replicas is not None:
            early = self.replicas.result_of(pipeline, task, worker.number)
            if early is not None:
                pipeline.receive(task, early)
                return
            number //= len(self.workers)
            part = self.spec.part
            whole = len(indices) * part.world_size
            indices = part.positions(number * whole, (number + 1) * whole)
            resume = self.replicas.ask(pipeline, worker.number, number)
        elif worker.has_new_copy:
            resume = worker.copy_state
        fields: tuple[Any, ...]
        fields = number, indices, task.key, task.sample_keys, task.padding
        if not self.spec.reads:
            fields += (task.samples,)
        name, maker = next(self._names), pipeline.maker
        epochs = maker.epoch, maker.dataset_epoch
        request = Request(name, id(pipeline), epochs, fields, task.again, resume)
        self.tickets[name] = Ticket(pipeline, task, request, worker)
        queue = worker.queue
        if queue.waiting or not self._send(queue, request):
            queue.waiting.append(request)

    def flush(self) -> None:
        """Send waiting requests while their queues have room."""
        for queue in self.queues:
            while queue.waiting and self._send(queue, queue.waiting[0]):
                queue.waiting.popleft()

    def _send(self, queue: Queue, request: Request) -> bool:
        """Send a request, or drop an obsolete one; return False if it must wait."""
        ticket = self.tickets.get(request.ticket)
        if ticket is None and request.ticket >= 0:
            return True
        slot = None
        try:
            if self.samples is None:
                frame = self._dumps(tuple(request))
            else:
                frame = b"".join(self._packer.pack(tuple(request)))
                slot = slot_of(frame, 0)
        except Exception as error:  # the user's classes may raise when pickled
            assert ticket is not None
            del self.tickets[request.ticket]
            result = BatchResult(error=error.with_traceback(None))
            ticket.pipeline.receive(ticket.task, result)
            return True
        is_sent = queue.send(request.ticket, frame)
        if slot is not None and ticket is not None:
            ticket.slot, self._readers[slot] = slot, request.ticket
            if not is_sent:
                self._free_unread(slot)
        return is_sent

    def forget(self, pipeline: Pipeline) -> None:
        for name, ticket in list(self.tickets.items()):
            if ticket.pipeline is pipeline:
                del self.tickets[name]
        if self.replicas is not None:
            self.replicas.forget(pipeline)
            for queue in self.queues:
                queue.waiting.append(Request(-1, id(pipeline)))
            self.flush()

    def accept(self, frame: bytes | memoryview) -> BaseException | None:
        """Handle a worker's message: deliver a result, or return a fatal error."""
        kind, number, name, *made = RESULT_HEAD.unpack_from(frame)
        worker = self.workers[number]
        if kind == READY:
            worker.is_ready = True
            return None
        if kind == FATAL:
            error: BaseException
            error = unpack(frame, RESULT_HEAD.size, worker.arena).raisable()
            return error
        worker.starts = 0
        slot = slot_of(frame, RESULT_HEAD.size)
        ticket = self.tickets.pop(name, None)
        if ticket is None:  # the iteration has ended, or the batch was made twice
            if slot is not None:
                worker.arena.free(slot)
            return None
        task, failures = ticket.task, list[Failure]()
        try:
            most = self.spec.in_flight + _MAX_HELD
            lent = [worker.arena.lent for worker in self.workers] if slot else []
            copy = slot is not None and sum(map(len, lent)) >= most
            value = unpack(frame, RESULT_HEAD.size, worker.arena, copy=copy)
        except Exception as error:  # of a user's class
            result = unopened(error, number)
        else:
            if kind == BATCH:
                result = BatchResult(value)
            else:
                result, failures = opened(value, task)
        result.made, result.worker = of_both(task, made), number
        if self._has_copies or self.replicas is not None or ticket.slot is not None:
            result = self._note(worker, ticket, result)
        task.samples = []
        if made[4]:
            # Only batches in frames form runs, and a run must fit into the socket.
            share = RUN_SECONDS * (len(frame) / WAITING_BYTES if slot is None else 1)
            ticket.pipeline.note_pace(max(share, made[4] - made[0]), 1)
        ticket.pipeline.receive(task, result, failures)
        return None

    def _note(self, worker: Worker, ticket: Ticket, result: BatchResult) -> BatchResult:
        """Record a worker's progress; return its result as the consumer sees it."""
        slot, request = ticket.slot, ticket.request
        if slot is not None and self._readers.get(slot) == request.ticket:
            self._readers[slot] = worker
        if self.replicas is not None:
            number = request.asked[0]
            return self.replicas.passed(ticket.pipeline, worker.number, result, number)
        worker.has_new_copy = False
        if result.dataset is not None:
            worker.copy_state = (result.dataset[1],)
        return result

    def renew(self, dead: Worker, taken: Iterable[int]) -> None:
        """Prepare a dead worker for a new process; ``taken`` lists the tickets it held.

        The process gets the last state of the worker's copy of the dataset. Slots with
        samples for the dead process are freed.
        """
        dead.arena.close()
        dead.arena = self._make_arena()
        dead.pid, dead.is_ready, dead.is_stuck = None, False, False
        if self._has_copies:
            dead.has_new_copy = True
            for ticket in self.tickets.values():
                if ticket.worker is dead:
                    ticket.request = ticket.request._replace(resume=dead.copy_state)
        readers = {dead, *taken}
        for slot, reader in list(self._readers.items()):
            if reader in readers:
                self._free_unread(slot)

    def take_back(self, queue: Queue) -> None:
        """Remove a queue's requests that no worker has taken; keep their tickets."""
        for frame in queue.take_back():
            slot = slot_of(frame, 0) if self.samples is not None else None
            if slot in self._readers:
                self._free_unread(slot)
        queue.waiting.clear()

    def _free_unread(self, slot: SlotRef) -> None:
        assert self.samples is not None
        del self._readers[slot]
        self.samples.free(slot)

    def close(self) -> None:
        """Drop all tickets and requests; the pool's ``stack`` closes the queues."""
        self.tickets.clear()
        self.replicas = None  # it would keep pipelines alive
        for queue in self.queues:
            self.take_back(queue)
