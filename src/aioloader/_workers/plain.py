"""Serving plain code: in the worker's main thread, one request after the other."""

import contextlib
import time
from collections.abc import Callable

from aioloader._pipeline.stream import SyncStream
from aioloader._pipeline.work import Outcome, Work
from aioloader._transport.channel import Channel
from aioloader._workers.desk import COLLATE, TRANSFORM, Desk
from aioloader._workers.messages import Kind, Request
from aioloader.protocols import Kind as DatasetKind


def serve_plainly(desk: Desk, requests: Channel) -> None:
    """Serve until the loader is gone.

    Raises:
        EOFError: Then.
    """
    streams: dict[int, SyncStream] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(_enter(desk))
        desk.send(Kind.READY, -1, None)
        stack.callback(_close_all, streams)
        while True:
            request = desk.receive(requests)
            if request.ticket < 0:
                if request.run in streams:
                    streams.pop(request.run).close()
                continue
            work = desk.take(request, 0)
            stream = None
            if desk.recipe.reads and desk.recipe.kind is DatasetKind.ITERABLE:
                stream = streams.get(request.run)
                if stream is None:
                    drop_last = desk.shipment.drop_last
                    state, keys = request.resume or (None, None)
                    stream = SyncStream(
                        desk.recipe, drop_last=drop_last, resume=state, keys=keys
                    )
                    streams[request.run] = stream
            outcome = _make(desk, request, work, stream)
            outcome = desk.recipe.leave(work, outcome)
            desk.answer(work, request.ticket, 0, outcome)


def _enter(desk: Desk) -> Callable[[], None]:
    """Enter the lifespan of the dataset; return what leaves it."""
    lifespan = desk.lifespan()
    try:
        lifespan.enter()
    except Exception as error:  # raised by the loader
        desk.give_up(error)

    def leave() -> None:
        with desk.printing():
            lifespan.leave()

    return leave


def _close_all(streams: dict[int, SyncStream]) -> None:
    for stream in streams.values():
        stream.close()


def _make(
    desk: Desk, request: Request, work: Work, stream: SyncStream | None
) -> Outcome:
    recipe = desk.recipe
    try:
        desk.restore(request)
        with recipe.around(work):
            if stream is not None:
                stream.pull(work)
                if work.outcome is not None:
                    return work.outcome
            elif recipe.reads:
                recipe.read(work, time.sleep)
            desk.enter(TRANSFORM)
            recipe.apply(work)
            desk.enter(COLLATE)
            return recipe.collate(work)
    except Exception as error:  # handed to the consumer
        return Outcome(error=error)
