"""Serve requests with coroutines: the loader's own pipeline inside the worker.

A private loop reads many samples at once, across batch boundaries, and another thread
runs the plain code. The worker's main thread takes requests, at most ``window`` at a
time, so that other workers can take the batches that have not started.
"""

import contextlib
import queue
import select
import threading
from typing import Any

from aioloader._order.epoch import Bookmark
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.host import GRACE
from aioloader._pipeline.hosts import Hosts
from aioloader._pipeline.pipeline import Pipeline
from aioloader._transport.channel import Channel
from aioloader._transport.in_flight_table import PLACES
from aioloader._workers.process.endpoint import Endpoint
from aioloader._workers.process.messages import READY, Request


def serve_async(endpoint: Endpoint, requests: Channel) -> None:
    """Serve until the loader is gone.

    Raises:
        EOFError: When the loader is gone.
    """
    server = _Server(endpoint)
    try:
        server.open()
        endpoint.send(READY, -1, None)
        server.serve(requests)
    finally:
        server.close()


_OVER = -1


class _Server:
    """Requests in, tasks to the pipeline, results to the endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._size = max(1, min(PLACES, endpoint.spec.window))
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._open(range(self._size))
        self._held: dict[int, tuple[int, int, bool]] = {}  # by the task's identity
        spec = endpoint.spec
        reads = (spec.dataset, spec.lifespan) if spec.reads else ((), None)
        self._hosts = Hosts(*reads)
        self._hosts.keep()
        self._host = self._hosts.lease("loop")
        self._pipelines: dict[int, Pipeline] = {}

    def open(self) -> None:
        """Enter the lifespan of the dataset, on the loop that reads it."""
        self._host.open()
        failure = self._host.failure()
        if failure is not None:
            self._endpoint.give_up(failure)

    def serve(self, requests: Channel) -> None:
        """Take requests while there is a free place."""
        threading.Thread(target=self._watch, args=(requests,), daemon=True).start()
        while True:
            place = self._free.get()
            if place == _OVER:
                raise EOFError("the loader is gone")
            request = self._endpoint.receive(requests)
            if request.ticket < 0:
                pipeline = self._pipelines.pop(request.iteration, None)
                if pipeline is not None:
                    pipeline.dismiss()
                self._free.put(place)
                continue
            if request.is_alone:
                for _ in range(self._size - 1):
                    self._free.get()
            task = self._endpoint.take(request, place)
            self._held[id(task)] = (request.ticket, place, request.is_alone)
            if task.result is not None:
                self._deliver(task, task.result)
            else:
                self._pipeline_of(request).submit(task)

    def _watch(self, requests: Channel) -> None:
        """Notice the end of requests even while no place is free."""
        poll = select.poll()
        poll.register(requests.fileno(), 0)  # hang-ups are reported anyway
        poll.poll()
        self._free.put(_OVER)

    def close(self) -> None:
        """End all iterations and leave the lifespan."""
        for pipeline in self._pipelines.values():
            pipeline.dismiss()
        for pipeline in self._pipelines.values():
            pipeline.ended.wait(GRACE)
        self._host.release()
        self._hosts.leave()
        with self._endpoint.leaving():
            self._hosts.release()

    def _pipeline_of(self, request: Request) -> Pipeline:
        # Map-style datasets have no state per iteration: one pipeline serves all.
        key = request.iteration if self._endpoint.maker.is_stream() else -1
        pipeline = self._pipelines.get(key)
        if pipeline is None:
            pipeline = Pipeline(
                self._endpoint.maker,
                self._hosts.lease("loop"),
                in_order=False,
                bookmark=Bookmark(states={0: request.resume and request.resume[0]}),
                sink=self._deliver,
            )
            self._pipelines[key] = pipeline
        return pipeline

    def _deliver(self, task: BatchTask, result: BatchResult) -> None:
        """Send a result, from any thread."""
        ticket, place, is_alone = self._held.pop(id(task))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            # The loader may be gone: then the thread that reads requests ends us.
            self._endpoint.answer(task, ticket, place, result)
        self._open(range(self._size) if is_alone else [place])

    def _open(self, places: Any) -> None:
        for place in places:
            self._free.put(place)
