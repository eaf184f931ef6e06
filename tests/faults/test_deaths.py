"""Workers die: their batches are made again, in order, or the error says why not."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aioloader import DataLoader
from aioloader.errors import WorkerDiedError
from faulty import (
    ALL_OUTCOMES,
    CONSUMERS,
    AsyncFaulty,
    Faulty,
    FaultyAsyncStream,
    FaultyStream,
    Pids,
    await_news,
    exit_politely,
    kill_and_wait,
    kill_itself,
    leave,
    outcomes,
    outcomes_on_uvloop,
    parent_of,
    pids_of,
    pools_of,
    segfault,
    workers_of,
)

SERVED: dict[str, Any] = {"multiprocessing_context": "forkserver"}
ENDS = [kill_itself, segfault, leave, exit_politely]


@pytest.mark.slow
@pytest.mark.parametrize("start", [None, "spawn"])
@pytest.mark.parametrize("act", ENDS)
def test_a_batch_is_made_again_however_its_worker_ends(
    act: Any, start: Any, tmp_path: Path
) -> None:
    """Order and augmentations are those of a run without deaths."""
    dataset = Faulty(24, (5, 14), act, tmp_path)
    torch.manual_seed(0)
    options: Any = {"num_workers": 2, "multiprocessing_context": start}
    batches = list(DataLoader(dataset, 4, **options))
    torch.manual_seed(0)
    undisturbed = list(DataLoader(Faulty(24), 4, num_workers=2))
    torch.testing.assert_close(batches, undisturbed, rtol=0, atol=0)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize("consume", CONSUMERS)
@pytest.mark.parametrize("in_order", [True, False])
def test_a_death_loses_no_sample_for_any_consumer(
    consume: Any, in_order: bool, tmp_path: Path
) -> None:
    """In ``for`` and in ``async for``, in order or not."""
    dataset = Faulty(1_600, (0, 9, 1_599), kill_itself, tmp_path)  # of long runs
    batches = consume(DataLoader(dataset, 4, num_workers=2, in_order=in_order))
    assert sorted(i for batch in batches for i in batch[2].tolist()) == [*range(1_600)]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("consume", CONSUMERS)
def test_a_dying_async_worker_loses_no_batch(consume: Any, tmp_path: Path) -> None:
    """Several batches were being made."""
    dataset = AsyncFaulty(48, (3, 20, 33), kill_itself, tmp_path)
    batches = consume(DataLoader(dataset, 4, num_workers=2, concurrency=16))
    assert [i for _, batch in batches for i in batch.tolist()] == list(range(48))


# -- batches that kill -------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("consume", ALL_OUTCOMES)
@pytest.mark.parametrize("make", [Faulty, AsyncFaulty])
def test_only_the_batch_that_kills_is_an_error(make: Any, consume: Any) -> None:
    """It kills two workers; then it is an error, and iteration resumes."""
    batches = consume(DataLoader(make(40, (13,), kill_itself), 4, num_workers=2))
    error = batches[3]
    assert isinstance(error, WorkerDiedError)
    assert isinstance(error, RuntimeError)
    assert (error.batch, error.exitcode) == (3, -signal.SIGKILL)
    assert error.pid is not None
    text = str(error)
    assert f"(pid(s) {error.pid}) exited unexpectedly" in text
    assert "SIGKILL" in text
    assert "batch 3" in text
    assert "[12, 13, 14, 15]" in text
    labels = [i for batch in batches if batch is not error for i in batch[-1].tolist()]
    assert labels == [*range(12), *range(16, 40)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "exitcode", "word"),
    [
        (segfault, -signal.SIGSEGV, "SIGSEGV"),
        (leave, 7, "exit status 7"),
        (exit_politely, 9, "exit status 9"),
    ],
)
@pytest.mark.parametrize("start", [None, "spawn"])
def test_the_error_says_how_a_worker_ended(
    act: Any, exitcode: int, word: str, start: Any
) -> None:
    """Exit status or signal; after a crash, the Python stack."""
    options: Any = {"num_workers": 1, "multiprocessing_context": start}
    _, error = outcomes(DataLoader(Faulty(8, (5,), act), 4, **options))
    assert isinstance(error, WorkerDiedError)
    assert error.exitcode == exitcode
    assert word in str(error)
    assert ("in happen" in str(error)) == (act is segfault)


@pytest.mark.slow
def test_the_epoch_ends_though_every_batch_kills() -> None:
    """A death is no failed sample, so on_error='skip' does not skip it."""
    dataset = Faulty(12, tuple(range(12)))
    errors = outcomes(DataLoader(dataset, 4, num_workers=2, on_error="skip"))
    assert [type(error) for error in errors] == [WorkerDiedError] * 3


# -- the supervisor or the fork server dies ----------------------------------------


@pytest.mark.linux
@pytest.mark.slow
@pytest.mark.parametrize("consume", CONSUMERS)
@pytest.mark.parametrize(("way", "end"), [(9, "SIGKILL"), (15, "status 143")])
def test_the_epoch_ends_with_an_error_if_its_supervisor_dies(
    way: int, end: str, consume: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has nothing about its workers."""

    def kill_supervisor() -> None:
        os.kill(os.getppid(), way)
        signal.pause()

    loader: Any = DataLoader(Faulty(200, (40,), kill_supervisor), 4, num_workers=2)
    with pytest.raises(WorkerDiedError, match=rf"supervisor .* {end}"):
        consume(loader)
    assert not caplog.records
    loader.dataset.at = ()
    assert len(consume(loader)) == 50


@pytest.mark.linux
def test_a_served_supervisor_that_dies_is_replaced() -> None:
    """Its workers die with it; a new supervisor starts others."""
    iterator = iter(DataLoader(Faulty(200), 4, num_workers=2, **SERVED))
    batches = [next(iterator)]
    kill_and_wait(parent_of(pids_of(pools_of(iterator))[0]))
    batches += iterator
    assert [i for batch in batches for i in batch[2].tolist()] == list(range(200))


@pytest.mark.linux
@pytest.mark.slow
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_fork_server_that_dies_is_replaced(is_alone: bool) -> None:
    """With its supervisor or without; the running epoch continues."""
    iterator = iter(DataLoader(Faulty(200), 4, num_workers=2, **SERVED))
    first = [next(iterator)]
    workers = pools_of(iterator)._dispatcher.workers
    while not (pids := [worker.pid for worker in workers if worker.pid]):
        first.append(next(iterator))  # the notes of their starts come beside batches
    supervisor = parent_of(pids[0])
    kill_and_wait(parent_of(supervisor))
    if not is_alone:
        kill_and_wait(supervisor)
    first += iterator
    again = list(DataLoader(Faulty(200), 4, num_workers=2, **SERVED))
    for batches in (first, again):
        labels = [i for batch in batches for i in batch[2].tolist()]
        assert labels == list(range(200))


@pytest.mark.slow
@pytest.mark.parametrize("consume", CONSUMERS)
def test_persistent_workers_that_die_idle_are_replaced(consume: Any) -> None:
    """The others stay."""
    loader = DataLoader(Pids(), 4, num_workers=2, persistent_workers=True)
    with loader:
        consume(loader)
        before = workers_of(loader)
        kill_and_wait(before[0])
        await_news(loader)
        assert len(consume(loader)) == 6
        after = workers_of(loader)
        assert (after[0] == before[0], after[1] == before[1]) == (False, True)
        for pid in after.values():
            kill_and_wait(pid)
        assert len(consume(loader)) == 6


@pytest.mark.linux
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_supervisor_that_dies_between_epochs_is_replaced(method: str) -> None:
    options: Any = {"persistent_workers": True, "multiprocessing_context": method}
    with DataLoader[Any](Pids(), 4, num_workers=2, **options) as loader:
        list(loader)
        kill_and_wait(parent_of(workers_of(loader)[0]))
        assert len(list(loader)) == 6


# -- streams -----------------------------------------------------------------------


class Resumable(FaultyStream):
    """A stream with torchdata's protocol."""

    place = 0

    def __iter__(self) -> Iterator[int]:
        worker: Any = torch.utils.data.get_worker_info()
        while self.place < self.n:
            label = worker.id * 1000 + self.place
            self.place += 1
            self.happen(label)
            yield label

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


@pytest.mark.slow
@pytest.mark.parametrize("consume", ALL_OUTCOMES)
@pytest.mark.parametrize("make", [FaultyStream, FaultyAsyncStream, Resumable])
def test_a_dead_replica_ends_its_stream_with_one_error(make: Any, consume: Any) -> None:
    """If it has no state, or dies again at the same sample."""
    dataset = make(12, (1006,), kill_itself)
    batches = consume(DataLoader(dataset, 4, num_workers=2, fetch="workers"))
    (error,) = [batch for batch in batches if isinstance(batch, Exception)]
    assert type(error) is WorkerDiedError
    assert make is Resumable or "iterable dataset" in str(error)
    labels = [i for batch in batches if batch is not error for i in batch.tolist()]
    assert [i for i in labels if i < 1000] == list(range(12))
    rest = [i for i in labels if i >= 1000]
    assert rest == [1000, 1001, 1002, 1003] or (make is not Resumable and not rest)


@pytest.mark.slow
@pytest.mark.parametrize("consume", [outcomes, outcomes_on_uvloop])
@pytest.mark.parametrize("places", [(1006,), (1004, 1007, 9), (1005, 1006, 1311)])
def test_a_resumable_replica_loses_nothing_when_it_dies(
    places: tuple[int, ...], consume: Any, tmp_path: Path
) -> None:
    """Nothing is lost, duplicated or out of order, however often the worker dies."""
    whole = consume(DataLoader(Resumable(400), 3, num_workers=2))
    dataset = Resumable(400, places, kill_itself, tmp_path)
    batches = consume(DataLoader(dataset, 3, num_workers=2))
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in whole]


class Uneven(FaultyStream):
    """Worker 1 has little to read."""

    def __iter__(self) -> Any:
        worker: Any = torch.utils.data.get_worker_info()
        return iter(range(4 if worker.id else self.n))


def test_a_replica_that_dies_after_its_end_loses_nothing() -> None:
    iterator = iter(DataLoader(Uneven(200), 4, num_workers=2))
    batches = [next(iterator) for _ in range(20)]
    kill_and_wait(pools_of(iterator)._dispatcher.workers[1].pid)
    batches += iterator
    labels = [i for batch in batches for i in batch.tolist()]
    assert sorted(labels) == sorted([*range(200), *range(4)])
