"""Serving coroutines: the loader's own pipeline, hosted inside the worker.

A private loop reads many samples at once, across batch boundaries, and a thread beside
it runs the plain code. The worker's main thread takes requests, at most ``window`` at a
time, so that a batch that nobody works on stays where another worker can take it.
"""

import contextlib
import queue
import select
import threading
from typing import Any

from aioloader._order.progress import Bookmark
from aioloader._pipeline.guests import Keeper
from aioloader._pipeline.home import GRACE
from aioloader._pipeline.homes import Homes
from aioloader._pipeline.run import Run
from aioloader._pipeline.work import Outcome, Work
from aioloader._transport.board import PLACES
from aioloader._transport.channel import Channel
from aioloader._workers.desk import Desk
from aioloader._workers.messages import Kind, Request


def serve_hosted(desk: Desk, requests: Channel) -> None:
    """Serve until the loader is gone.

    Raises:
        EOFError: Then.
    """
    server = _Server(desk)
    try:
        server.open()
        desk.send(Kind.READY, -1, None)
        server.serve(requests)
    finally:
        server.close()


_OVER = -1


class _Server:
    """Requests in, works to the pipeline, outcomes to the desk."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._size = max(1, min(PLACES, desk.shipment.window))
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._open(range(self._size))
        self._held: dict[int, tuple[int, int, bool]] = {}  # by the work's identity
        shipment = desk.shipment
        reads = (shipment.dataset, shipment.lifespan) if shipment.reads else ((), None)
        self._homes = Homes(*reads)
        self._homes.keep()
        self._home = self._homes.lease("loop")
        self._runs: dict[int, Run] = {}

    def open(self) -> None:
        """Enter the lifespan of the dataset, on the loop that reads it."""
        self._home.open()
        failure = self._home.failure()
        if failure is not None:
            self._desk.give_up(failure)

    def serve(self, requests: Channel) -> None:
        """Take requests while there is a place for them."""
        threading.Thread(target=self._watch, args=(requests,), daemon=True).start()
        while True:
            place = self._free.get()
            if place == _OVER:
                raise EOFError("the loader is gone")
            request = self._desk.receive(requests)
            if request.ticket < 0:
                run = self._runs.pop(request.run, None)
                if run is not None:
                    run.dismiss()
                self._free.put(place)
                continue
            if request.is_alone:
                for _ in range(self._size - 1):
                    self._free.get()
            work = self._desk.take(request, place)
            self._held[id(work)] = (request.ticket, place, request.is_alone)
            try:
                self._desk.restore(request)
            except Exception as error:  # of the user's class; handed to the consumer
                self._deliver(work, Outcome(error=error))
                continue
            self._run_of(request).submit(work)

    def _watch(self, requests: Channel) -> None:
        """Learn that requests are over also while there is no place for one."""
        poll = select.poll()
        poll.register(requests.fileno(), 0)  # hang-ups are told anyway
        poll.poll()
        self._free.put(_OVER)

    def close(self) -> None:
        """End all iterations, and leave the lifespan."""
        for run in self._runs.values():
            run.dismiss()
        for run in self._runs.values():
            run.ended.wait(GRACE)
        self._home.dismiss(Keeper())
        self._homes.leave()
        with self._desk.printing():
            self._homes.release()

    def _run_of(self, request: Request) -> Run:
        # Map-style datasets have no state of an iteration: one run serves all.
        key = request.run if self._desk.recipe.is_stream() else -1
        run = self._runs.get(key)
        if run is None:
            shipment = self._desk.shipment
            run = Run(
                self._desk.recipe,
                self._homes.lease("loop"),
                concurrency=shipment.concurrency,
                in_order=False,
                drop_last=shipment.drop_last,
                bookmark=Bookmark(states={0: request.resume and request.resume[0]}),
                sink=self._deliver,
            )
            self._runs[key] = run
        return run

    def _deliver(self, work: Work, outcome: Outcome) -> None:
        """Send an outcome, in whatever thread it came about."""
        ticket, place, is_alone = self._held.pop(id(work))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            # The loader may be gone: whoever reads requests ends this process.
            self._desk.answer(work, ticket, place, outcome)
        self._open(range(self._size) if is_alone else [place])

    def _open(self, places: Any) -> None:
        for place in places:
            self._free.put(place)
