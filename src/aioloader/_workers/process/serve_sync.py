"""Serving plain code: in the worker's main thread, one request after the other."""

import contextlib
import time
from collections.abc import Callable

from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.stream import SyncStream
from aioloader._transport.channel import Channel
from aioloader._workers.process.endpoint import COLLATE, TRANSFORM, Endpoint
from aioloader._workers.process.messages import Kind, Request
from aioloader.protocols import Kind as DatasetKind


def serve_plainly(endpoint: Endpoint, requests: Channel) -> None:
    """Serve until the loader is gone.

    Raises:
        EOFError: Then.
    """
    streams: dict[int, SyncStream] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(_enter(endpoint))
        endpoint.send(Kind.READY, -1, None)
        stack.callback(_close_all, streams)
        while True:
            request = endpoint.receive(requests)
            if request.ticket < 0:
                if request.run in streams:
                    streams.pop(request.run).close()
                continue
            task = endpoint.take(request, 0)
            stream = None
            if endpoint.maker.reads and endpoint.maker.kind is DatasetKind.ITERABLE:
                stream = streams.get(request.run)
                if stream is None:
                    drop_last = endpoint.spec.drop_last
                    state, keys = request.resume or (None, None)
                    stream = SyncStream(
                        endpoint.maker, drop_last=drop_last, resume=state, keys=keys
                    )
                    streams[request.run] = stream
            result = _make(endpoint, request, task, stream)
            result = endpoint.maker.leave(task, result)
            endpoint.answer(task, request.ticket, 0, result)


def _enter(endpoint: Endpoint) -> Callable[[], None]:
    """Enter the lifespan of the dataset; return what leaves it."""
    lifespan = endpoint.lifespan()
    try:
        lifespan.enter()
    except Exception as error:  # raised by the loader
        endpoint.give_up(error)

    def leave() -> None:
        with endpoint.printing():
            lifespan.leave()

    return leave


def _close_all(streams: dict[int, SyncStream]) -> None:
    for stream in streams.values():
        stream.close()


def _make(
    endpoint: Endpoint, request: Request, task: BatchTask, stream: SyncStream | None
) -> BatchResult:
    maker = endpoint.maker
    try:
        endpoint.restore(request)
        with maker.around(task):
            if stream is not None:
                stream.pull(task)
                if task.result is not None:
                    return task.result
            elif maker.reads:
                maker.read(task, time.sleep)
            endpoint.enter(TRANSFORM)
            maker.apply(task)
            endpoint.enter(COLLATE)
            return maker.collate(task)
    except Exception as error:  # handed to the consumer
        return BatchResult(error=error)
