"""Streams that every worker reads for itself: who has ended, and when all have.

Batch k is for worker k modulo the number of workers, so that the order is a round robin
that skips the workers whose streams have ended. Pure and synchronous.
"""

from typing import Any, TypeAlias

from aioloader._pipeline.work import Outcome
from aioloader.errors import WorkerDiedError

Run: TypeAlias = Any  # an iteration, by identity


class Replicas:
    """The streams of each iteration.

    Args:
        number: How many workers read; 0 if workers do not read streams.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._begun: dict[Run, set[int]] = {}
        self._ended: dict[Run, set[int]] = {}
        self._lost: dict[tuple[Run, int], WorkerDiedError] = {}

    def outcome_of(self, run: Run, worker: int) -> Outcome | None:
        """Return what comes of a new request at once, or None if the worker decides."""
        ended = self._ended.get(run)
        if not ended:
            return None
        lost = self._lost.pop((run, worker), None)
        if lost is not None:
            return Outcome(error=lost)
        if len(ended) == self._number:
            return Outcome(is_end=True)
        return Outcome(is_empty=True) if worker in ended else None

    def resume_of(self, run: Run, worker: int) -> Any:
        """Return where a worker that has not begun is to begin."""
        is_begun = worker in self._begun.get(run, ())
        return None if is_begun else run.bookmark.states.get(worker)

    def begin(self, run: Run, worker: int) -> None:
        """Note that a worker has begun to read."""
        self._begun.setdefault(run, set()).add(worker)

    def passed(self, run: Run, worker: int, outcome: Outcome) -> Outcome:
        """Return what the consumer is to see of a worker's outcome.

        The end of one stream is nothing to it: the request after the last end tells.
        """
        if not self._number:
            return outcome
        self.begin(run, worker)
        if not outcome.is_end:
            return outcome
        self._ended.setdefault(run, set()).add(worker)
        return Outcome(is_empty=True, state=outcome.state)

    def lose(self, worker: int, error: WorkerDiedError) -> list[Run]:
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

    def forget(self, run: Run) -> None:
        """Forget an iteration that is over."""
        self._begun.pop(run, None)
        self._ended.pop(run, None)
        for key in [key for key in self._lost if key[0] is run]:
            del self._lost[key]
