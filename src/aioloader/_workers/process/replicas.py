"""The streams of workers that each read their own: which have ended, and when all have.

Batch k is for worker k modulo the number of workers: a round robin that skips workers
whose streams have ended. A stream with a state can continue in another process. Pure
and synchronous.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

from aioloader._order.epoch import Bookmark, Progress
from aioloader._pipeline.batch_task import BatchResult
from aioloader._pipeline.position import has_state
from aioloader.errors import WorkerDiedError

Pipeline: TypeAlias = Any  # an iteration, by identity


@dataclass(eq=False)
class _Stream:
    """What one worker reads in one iteration.

    Attributes:
        has_begun: Whether its process has started to read.
        has_ended: Whether there is no more.
        lost: The error that its next request raises.
        read: Which of its batches have arrived.
        state: Its last state, if it was continued after a death.
    """

    has_begun: bool = False
    has_ended: bool = False
    lost: WorkerDiedError | None = None
    read: Progress | None = None
    state: Any = None


class Replicas:
    """The streams of each iteration, for ``number`` workers."""

    def __init__(self, number: int, *, has_state: bool = False) -> None:
        self._number = number
        self._has_state = has_state
        self._streams: dict[Pipeline, list[_Stream]] = {}

    def result_of(self, pipeline: Pipeline, worker: int) -> BatchResult | None:
        """Return the result of a new request if it is known without the worker."""
        streams = self._streams_of(pipeline)
        stream = streams[worker]
        if stream.lost is not None:
            lost, stream.lost = stream.lost, None
            return BatchResult(error=lost, has_ended=True)
        if not stream.has_ended:
            return None
        if all(one.has_ended for one in streams):
            return BatchResult(is_end=True, has_ended=True)
        return BatchResult(is_empty=True, has_ended=True)

    def ask(self, pipeline: Pipeline, worker: int, number: int) -> Any:
        """Note a request; return where a new process starts to read, or None.

        ``number`` is the position of the batch in the worker's own stream; its first
        request has the lowest one.
        """
        stream = self._streams_of(pipeline)[worker]
        if stream.read is None:
            first = pipeline.bookmark.states.get(worker)
            states = {} if first is None else {0: first}
            stream.read = Progress(Bookmark(number, states=states))
        return None if stream.has_begun else self.resume_of(pipeline, worker)

    def resume_of(self, pipeline: Pipeline, worker: int) -> Any:
        """Return the state that a stream continues from, and its seeds; or None."""
        state = self._streams_of(pipeline)[worker].state
        state = state or pipeline.bookmark.states.get(worker)
        if state is None:
            return None
        return state, pipeline.maker.seeds(worker, self._number)

    def begin(self, pipeline: Pipeline, worker: int) -> None:
        self._streams_of(pipeline)[worker].has_begun = True

    def passed(
        self, pipeline: Pipeline, worker: int, result: BatchResult, number: int = 0
    ) -> BatchResult:
        """Return a worker's result as the consumer sees it.

        The end of one stream is an empty result; the request after the last end ends
        the iteration.
        """
        stream = self._streams_of(pipeline)[worker]
        stream.has_begun = True
        if stream.read is not None:
            stream.read.take(number, result.state)
        if not result.is_end:
            return result
        stream.has_ended = True
        return BatchResult(is_empty=True, has_ended=True, state=result.state)

    def restart(self, pipeline: Pipeline, worker: int) -> bool:
        """Continue a dead worker's stream in its successor; return whether possible.

        It is if the stream's state after all sent batches is known.
        """
        stream = self._streams_of(pipeline)[worker]
        if stream.read is None or stream.has_ended:
            return False
        bookmark = stream.read.bookmark()
        state = bookmark.states.get(0)
        can = self._has_state if state is None else has_state(state)
        if bookmark.beyond or not can:
            return False
        stream.has_begun = False
        if state is not None:
            stream.state = state
        return True

    def lose(self, worker: int, error: WorkerDiedError) -> list[Pipeline]:
        """End the streams that a dead worker was reading; return their iterations.

        The next request to the worker raises the error if none is in flight.
        """
        lost = []
        for pipeline, streams in self._streams.items():
            stream = streams[worker]
            if stream.has_begun and not stream.has_ended:
                stream.has_ended, stream.lost = True, error
                lost.append(pipeline)
        return lost

    def forget(self, pipeline: Pipeline) -> None:
        self._streams.pop(pipeline, None)

    def _streams_of(self, pipeline: Pipeline) -> list[_Stream]:
        streams = self._streams.get(pipeline)
        if streams is None:
            streams = [_Stream() for _ in range(self._number)]
            self._streams[pipeline] = streams
        return streams
