"""Track the streams of workers that each read a replica of an iterable dataset.

Batch k is made by worker k modulo the number of workers; it is empty if that worker's
stream has ended. A stream with a state can continue in another process. All
code here is synchronous.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from aioloader._order.epoch import EpochPosition, Progress
from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._pipeline.pipeline import Pipeline
from aioloader._pipeline.position import has_state
from aioloader.errors import WorkerDiedError


@dataclass(eq=False, repr=False)
class _ReplicaStream:
    """One worker's stream in one iteration, and how much of it has arrived."""

    has_begun: bool = False  # whether its process has returned a batch
    has_ended: bool = False
    lost: WorkerDiedError | None = None  # if lost: the error for its next request
    read: Progress | None = None  # which of its batches have arrived
    state: Any = None  # the state from which it continued after a death


class StreamReplicas:
    """The streams of ``number`` workers, by iteration."""

    def __init__(self, number: int, *, has_state: bool = False) -> None:
        self._number = number
        self._has_state = has_state
        self._streams: defaultdict[Pipeline, list[_ReplicaStream]] = defaultdict(
            lambda: [_ReplicaStream() for _ in range(number)]
        )

    def result_of(
        self, pipeline: Pipeline, task: BatchTask, worker: int
    ) -> BatchResult | None:
        """Return a request's result if its stream has ended; None to ask the worker."""
        streams = self._streams[pipeline]
        stream = streams[worker]
        if task.again or not stream.has_ended:
            return None
        if stream.lost is not None:
            lost, stream.lost = stream.lost, None
            return BatchResult(error=lost, has_ended=True)
        if all(each.has_ended for each in streams):
            return BatchResult(is_end=True, has_ended=True)
        return BatchResult(is_empty=True, has_ended=True)

    def ask(self, pipeline: Pipeline, worker: int, number: int) -> Any:
        """Record a request; return ``resume_of`` the stream if it has not begun.

        ``number`` is the batch's position in the worker's stream. A stream's first
        request has the lowest number.
        """
        stream = self._streams[pipeline][worker]
        if stream.read is None:
            first = pipeline.start.states.get(worker)
            states = {} if first is None else {0: first}
            stream.read = Progress(EpochPosition(number, states=states))
        return None if stream.has_begun else self.resume_of(pipeline, worker)

    def resume_of(self, pipeline: Pipeline, worker: int) -> Any:
        """Return the state to resume a stream from and its ``SampleKeys``, or None."""
        state = self._streams[pipeline][worker].state
        state = state or pipeline.start.states.get(worker)
        if state is None:
            return None
        return state, pipeline.maker.reader_keys(worker, self._number)

    def passed(
        self, pipeline: Pipeline, worker: int, result: BatchResult, number: int = 0
    ) -> BatchResult:
        """Record a worker's result; return the result as the consumer sees it.

        The end of one stream is an empty result. Once all streams have ended, the next
        request's result ends the iteration.
        """
        stream = self._streams[pipeline][worker]
        stream.has_begun = True
        if stream.read is not None:
            stream.read.take(number, result.state)
        if not result.is_end:
            return result
        stream.has_ended = True
        return BatchResult(is_empty=True, has_ended=True, state=result.state)

    def restart(
        self,
        worker: int,
        held: Collection[Pipeline],
        error: WorkerDiedError,
        *,
        can_continue: bool,
    ) -> list[Pipeline]:
        """Rewind a dead worker's streams; return the iterations that can continue.

        A stream continues if the state after all its arrived batches is known. Other
        streams end with ``error`` if they had begun or ``held`` has their iteration.
        """
        continued = []
        for pipeline, streams in self._streams.items():
            stream = streams[worker]
            if not stream.has_ended:
                if can_continue and self._rewind(stream):
                    continued.append(pipeline)
                elif stream.has_begun or pipeline in held:
                    stream.has_ended, stream.lost = True, error
        return continued

    def _rewind(self, stream: _ReplicaStream) -> bool:
        """Set a stream back to its last state; return whether the stream can resume."""
        if stream.read is None:
            return False
        position = stream.read.position()
        state = position.states.get(0)
        can = self._has_state if state is None else has_state(state)
        if position.beyond or not can:
            return False
        stream.has_begun = False
        stream.state = state or stream.state
        return True

    def forget(self, pipeline: Pipeline) -> None:
        self._streams.pop(pipeline, None)
