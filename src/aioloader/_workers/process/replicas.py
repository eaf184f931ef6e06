"""Streams that every worker reads for itself: who has ended, and when all have.

Batch k is for worker k modulo the number of workers, so that the order is a round robin
that skips the workers whose streams have ended. A stream that has a state of its own
continues in another process. Pure and synchronous.
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
        number: How many workers read; 0 if workers do not read streams.
        has_state: Whether their dataset has a state of its own.
    """

    def __init__(self, number: int, *, has_state: bool = False) -> None:
        self._number = number
        self._has_state = has_state
        self._begun: dict[Pipeline, set[int]] = {}
        self._ended: dict[Pipeline, set[int]] = {}
        self._lost: dict[tuple[Pipeline, int], WorkerDiedError] = {}
        self._read: dict[tuple[Pipeline, int], Progress] = {}
        self._resumed: dict[tuple[Pipeline, int], Any] = {}

    def result_of(self, run: Pipeline, worker: int) -> BatchResult | None:
        """Return what comes of a new request at once, or None if the worker decides."""
        ended = self._ended.get(run)
        if not ended:
            return None
        lost = self._lost.pop((run, worker), None)
        if lost is not None:
            return BatchResult(error=lost, has_ended=True)
        if len(ended) == self._number:
            return BatchResult(is_end=True, has_ended=True)
        if worker not in ended:
            return None
        return BatchResult(is_empty=True, has_ended=True)

    def ask(self, run: Pipeline, worker: int, number: int) -> Any:
        """Note a request; return where a worker that has not begun is to begin.

        Args:
            run: The iteration.
            worker: Who is asked; its first request has the lowest number.
            number: Place of the batch in the worker's own stream.
        """
        if (run, worker) not in self._read:
            first = run.bookmark.states.get(worker)
            states = {} if first is None else {0: first}
            self._read[run, worker] = Progress(Bookmark(number, states=states))
        if worker in self._begun.get(run, ()):
            return None
        return self.resume_of(run, worker)

    def resume_of(self, run: Pipeline, worker: int) -> Any:
        """Return where a stream was left, or where the epoch is resumed, or None."""
        return self._resumed.get((run, worker)) or run.bookmark.states.get(worker)

    def begin(self, run: Pipeline, worker: int) -> None:
        """Note that a worker has begun to read."""
        self._begun.setdefault(run, set()).add(worker)

    def passed(
        self, run: Pipeline, worker: int, result: BatchResult, number: int = 0
    ) -> BatchResult:
        """Return what the consumer is to see of a worker's result.

        The end of one stream is nothing to it: the request after the last end tells.

        Args:
            run: The iteration.
            worker: Whose stream it is from.
            result: What the worker has sent.
            number: Place of the batch in the worker's own stream.
        """
        if not self._number:
            return result
        self.begin(run, worker)
        progress = self._read.get((run, worker))
        if progress is not None:
            progress.take(number, result.state)
        if not result.is_end:
            return result
        self._ended.setdefault(run, set()).add(worker)
        return BatchResult(is_empty=True, has_ended=True, state=result.state)

    def restart(self, run: Pipeline, worker: int) -> bool:
        """Have a dead worker's stream continue in its successor; tell whether it can.

        That is possible if it has a state of its own, after all that it has sent.
        """
        progress = self._read.get((run, worker))
        if progress is None or worker in self._ended.get(run, ()):
            return False
        bookmark = progress.bookmark()
        state = bookmark.states.get(0)
        can = self._has_state if state is None else has_state(state)
        if bookmark.beyond or not can:
            return False
        self._begun.setdefault(run, set()).discard(worker)
        if state is not None:
            self._resumed[run, worker] = state
        return True

    def lose(self, worker: int, error: WorkerDiedError) -> list[Pipeline]:
        """End the streams that a worker had begun when it died; return whose they are.

        The error is for the next request to it, if it has none under way.
        """
        lost = []
        for run, begun in self._begun.items():
            ended = self._ended.setdefault(run, set())
            if worker in begun - ended:
                ended.add(worker)
                self._lost[run, worker] = error
                lost.append(run)
        return lost

    def forget(self, run: Pipeline) -> None:
        """Forget an iteration that is over."""
        self._begun.pop(run, None)
        self._ended.pop(run, None)
        for kept in (self._lost, self._read, self._resumed):
            for key in [key for key in kept if key[0] is run]:
                del kept[key]
