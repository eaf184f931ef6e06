"""The streams of workers that each read their own: which have ended, and when all have.

Batch k is for worker k modulo the number of workers: a round robin that skips workers
whose streams have ended. A stream with a state can continue in another process. Pure
and synchronous.
"""

from typing import Any, TypeAlias

from aioloader._order.epoch import Bookmark, Progress
from aioloader._pipeline.batch_task import BatchResult
from aioloader._pipeline.position import has_state
from aioloader.errors import WorkerDiedError

Pipeline: TypeAlias = Any  # an iteration, by identity


class Replicas:
    """The streams of each iteration.

    Args:
        number: How many workers read.
        has_state: Whether their dataset has a state.
    """

    def __init__(self, number: int, *, has_state: bool = False) -> None:
        self._number = number
        self._has_state = has_state
        self._begun: dict[Pipeline, set[int]] = {}
        self._ended: dict[Pipeline, set[int]] = {}
        self._lost: dict[tuple[Pipeline, int], WorkerDiedError] = {}
        self._read: dict[tuple[Pipeline, int], Progress] = {}
        self._resumed: dict[tuple[Pipeline, int], Any] = {}

    def result_of(self, pipeline: Pipeline, worker: int) -> BatchResult | None:
        """Return the result of a new request if it is known without the worker."""
        ended = self._ended.get(pipeline)
        if not ended:
            return None
        lost = self._lost.pop((pipeline, worker), None)
        if lost is not None:
            return BatchResult(error=lost, has_ended=True)
        if len(ended) == self._number:
            return BatchResult(is_end=True, has_ended=True)
        if worker not in ended:
            return None
        return BatchResult(is_empty=True, has_ended=True)

    def ask(self, pipeline: Pipeline, worker: int, number: int) -> Any:
        """Note a request; return the state for a new worker to start from, or None.

        Args:
            pipeline: The iteration.
            worker: The worker; its first request has the lowest number.
            number: Position of the batch in the worker's own stream.
        """
        if (pipeline, worker) not in self._read:
            first = pipeline.bookmark.states.get(worker)
            states = {} if first is None else {0: first}
            self._read[pipeline, worker] = Progress(Bookmark(number, states=states))
        if worker in self._begun.get(pipeline, ()):
            return None
        return self.resume_of(pipeline, worker)

    def resume_of(self, pipeline: Pipeline, worker: int) -> Any:
        """Return a stream's last state, or that of the resumed epoch, or None."""
        return self._resumed.get((pipeline, worker)) or pipeline.bookmark.states.get(
            worker
        )

    def begin(self, pipeline: Pipeline, worker: int) -> None:
        """Note that a worker has started to read."""
        self._begun.setdefault(pipeline, set()).add(worker)

    def passed(
        self, pipeline: Pipeline, worker: int, result: BatchResult, number: int = 0
    ) -> BatchResult:
        """Return a worker's result as the consumer sees it.

        The end of one stream is an empty result; the request after the last end ends
        the iteration.

        Args:
            pipeline: The iteration.
            worker: The worker that reads the stream.
            result: The worker's result.
            number: Position of the batch in the worker's own stream.
        """
        self.begin(pipeline, worker)
        progress = self._read.get((pipeline, worker))
        if progress is not None:
            progress.take(number, result.state)
        if not result.is_end:
            return result
        self._ended.setdefault(pipeline, set()).add(worker)
        return BatchResult(is_empty=True, has_ended=True, state=result.state)

    def restart(self, pipeline: Pipeline, worker: int) -> bool:
        """Continue a dead worker's stream in its successor; return whether possible.

        It is if the stream's state after all sent batches is known.
        """
        progress = self._read.get((pipeline, worker))
        if progress is None or worker in self._ended.get(pipeline, ()):
            return False
        bookmark = progress.bookmark()
        state = bookmark.states.get(0)
        can = self._has_state if state is None else has_state(state)
        if bookmark.beyond or not can:
            return False
        self._begun.setdefault(pipeline, set()).discard(worker)
        if state is not None:
            self._resumed[pipeline, worker] = state
        return True

    def lose(self, worker: int, error: WorkerDiedError) -> list[Pipeline]:
        """End the streams that a dead worker was reading; return their iterations.

        The next request to the worker raises the error if none is in flight.
        """
        lost = []
        for pipeline, begun in self._begun.items():
            ended = self._ended.setdefault(pipeline, set())
            if worker in begun - ended:
                ended.add(worker)
                self._lost[pipeline, worker] = error
                lost.append(pipeline)
        return lost

    def forget(self, pipeline: Pipeline) -> None:
        """Forget an iteration that is over."""
        self._begun.pop(pipeline, None)
        self._ended.pop(pipeline, None)
        for kept in (self._lost, self._read, self._resumed):
            for key in [key for key in kept if key[0] is pipeline]:
                del kept[key]
