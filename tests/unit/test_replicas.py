"""Streams that every worker reads: round robin over those that have not ended."""

from aioloader._pipeline.batch_task import BatchResult, BatchTask
from aioloader._workers.process.replicas import Replicas
from aioloader.errors import WorkerDiedError

END = BatchResult(is_end=True)
TASK = BatchTask(0, [])


def test_the_end_comes_when_all_have_ended() -> None:
    """The end of one is an empty outcome; the request after the last one tells."""
    replicas, run = Replicas(2), object()
    assert replicas.result_of(run, TASK, 0) is None
    assert replicas.passed(run, 0, END).is_empty
    ended = replicas.result_of(run, TASK, 0)
    assert ended is not None
    assert ended.is_empty
    assert not ended.is_end
    assert replicas.result_of(run, TASK, 1) is None
    batch = BatchResult([1])
    assert replicas.passed(run, 1, batch) is batch
    assert not replicas.passed(run, 1, END).is_end
    for worker in (0, 1):
        last = replicas.result_of(run, TASK, worker)
        assert last is not None
        assert last.is_end


def test_iterations_are_apart() -> None:
    """Each has its own streams; a forgotten one begins anew."""
    replicas, one, other = Replicas(1), object(), object()
    replicas.passed(one, 0, END)
    assert replicas.result_of(other, TASK, 0) is None
    replicas.forget(one)
    assert replicas.result_of(one, TASK, 0) is None


def test_a_death_is_told_once() -> None:
    """The next request to a dead worker's stream raises; then the stream is over."""
    replicas, begun, fresh = Replicas(2), object(), object()
    replicas.passed(begun, 1, BatchResult([1]))
    replicas.passed(fresh, 0, BatchResult([1]))
    error = WorkerDiedError("gone")
    for _ in range(2):
        assert not replicas.restart(1, [], error, can_continue=True)
    told = replicas.result_of(begun, TASK, 1)
    assert told is not None
    assert told.error is error
    after = replicas.result_of(begun, TASK, 1)
    assert after is not None
    assert after.is_empty
    assert replicas.result_of(fresh, TASK, 1) is None
    replicas.forget(begun)
    assert replicas.result_of(begun, TASK, 1) is None
