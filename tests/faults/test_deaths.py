"""Workers die: their batches are made again, in order, or the reason is told."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aioloader import DataLoader
from aioloader._workers.process.fork_server import fork_server_in_use
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


def same(found: list[Any], expected: list[Any]) -> bool:
    """Tell whether batches are alike, to the bit."""
    return len(found) == len(expected) and all(
        torch.equal(one, other)
        for batch, wanted in zip(found, expected, strict=True)
        for one, other in zip(batch, wanted, strict=True)
    )


def undisturbed(n: int = 24, **options: Any) -> list[Any]:
    """Return what a run without faults gives."""
    torch.manual_seed(0)
    return list(DataLoader(Faulty(n), 4, num_workers=2, **options))


@pytest.mark.slow
@pytest.mark.parametrize("start", [None, "spawn"])
@pytest.mark.parametrize("act", ENDS)
def test_a_batch_is_made_again_after_any_end(
    act: Any, start: Any, tmp_path: Path
) -> None:
    """Once each: order and augmentations are those of a run without deaths."""
    dataset = Faulty(24, (5, 14), act, tmp_path)
    torch.manual_seed(0)
    options: Any = {"num_workers": 2, "multiprocessing_context": start}
    found = list(DataLoader(dataset, 4, **options))
    assert same(found, undisturbed())
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize("consume", CONSUMERS)
@pytest.mark.parametrize("in_order", [True, False])
def test_a_death_is_mended_for_every_consumer(
    consume: Any, in_order: bool, tmp_path: Path
) -> None:
    """In ``for`` and in ``async for``, in order or not: each sample once."""
    dataset = Faulty(1_600, (0, 9, 1_599), kill_itself, tmp_path)  # of long runs
    found = consume(DataLoader(dataset, 4, num_workers=2, in_order=in_order))
    assert sorted(i for batch in found for i in batch[2].tolist()) == [*range(1_600)]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("consume", CONSUMERS)
def test_async_datasets_in_workers(consume: Any, tmp_path: Path) -> None:
    """Several batches were in hand: all are made again."""
    dataset = AsyncFaulty(48, (3, 20, 33), kill_itself, tmp_path)
    found = consume(DataLoader(dataset, 4, num_workers=2, concurrency=16))
    assert [i for _, batch in found for i in batch.tolist()] == list(range(48))


# -- batches that kill -------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("consume", ALL_OUTCOMES)
@pytest.mark.parametrize("make", [Faulty, AsyncFaulty])
def test_a_poison_batch_is_named_and_the_rest_comes(make: Any, consume: Any) -> None:
    """It kills two workers; then it is an error, and iteration goes on."""
    found = consume(DataLoader(make(40, (13,), kill_itself), 4, num_workers=2))
    error = found[3]
    assert isinstance(error, WorkerDiedError)
    assert isinstance(error, RuntimeError)
    assert (error.batch, error.exitcode) == (3, -signal.SIGKILL)
    assert error.pid is not None
    text = str(error)
    assert f"(pid(s) {error.pid}) exited unexpectedly" in text
    assert "SIGKILL" in text
    assert "batch 3" in text
    assert "[12, 13, 14, 15]" in text
    labels = [i for batch in found if batch is not error for i in batch[-1].tolist()]
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
def test_the_error_tells_how_it_ended(
    act: Any, exitcode: int, word: str, start: Any
) -> None:
    """Exit status or signal; of a crash, the Python stack."""
    options: Any = {"num_workers": 1, "multiprocessing_context": start}
    found = outcomes(DataLoader(Faulty(8, (5,), act), 4, **options))
    error = found[1]
    assert isinstance(error, WorkerDiedError)
    assert error.exitcode == exitcode
    assert word in str(error)
    assert ("in happen" in str(error)) == (act is segfault)


@pytest.mark.slow
def test_every_batch_is_poison() -> None:
    """The loader comes to the end all the same; a death is no sample to be skipped."""
    dataset = Faulty(12, tuple(range(12)))
    found = outcomes(DataLoader(dataset, 4, num_workers=2, on_error="skip"))
    assert [type(one) for one in found] == [WorkerDiedError] * 3


# -- who watches is gone, too ------------------------------------------------------


@pytest.mark.linux
@pytest.mark.slow
@pytest.mark.parametrize("consume", CONSUMERS)
@pytest.mark.parametrize(("way", "end"), [(9, "SIGKILL"), (15, "status 143")])
def test_the_forked_supervisor_dies(
    way: int, end: str, consume: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The epoch ends with an error; the log has nothing about its workers."""

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
def test_the_served_supervisor_dies() -> None:
    """Its workers die with it; others take over in a new one."""
    iterator = iter(DataLoader(Faulty(200), 4, num_workers=2, **SERVED))
    found = [next(iterator)]
    kill_and_wait(parent_of(pids_of(pools_of(iterator))[0]))
    found += iterator
    assert [i for batch in found for i in batch[2].tolist()] == list(range(200))


@pytest.mark.linux
@pytest.mark.slow
@pytest.mark.parametrize("is_alone", [True, False])
def test_the_fork_server_dies(is_alone: bool) -> None:
    """With or without all below it; what runs continues, and a next one is served."""
    iterator = iter(DataLoader(Faulty(200), 4, num_workers=2, **SERVED))
    server = fork_server_in_use()
    assert server is not None
    found = [next(iterator)]
    workers = pools_of(iterator)._dispatcher.workers
    while not (pids := [worker.pid for worker in workers if worker.pid]):
        found.append(next(iterator))  # the notes of their starts come beside batches
    kill_and_wait(server.pid)
    if not is_alone:
        kill_and_wait(parent_of(pids[0]))
    found += iterator
    again = list(DataLoader(Faulty(200), 4, num_workers=2, **SERVED))
    assert fork_server_in_use() is not server
    for batches in (found, again):
        labels = [i for batch in batches for i in batch[2].tolist()]
        assert labels == list(range(200))


@pytest.mark.slow
@pytest.mark.parametrize("consume", CONSUMERS)
def test_deaths_between_epochs(consume: Any) -> None:
    """Persistent workers that died in idleness are replaced, the others stay."""
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
def test_the_supervisor_dies_between_epochs(method: str) -> None:
    """The next epoch has a new one."""
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
def test_the_death_of_a_replica(make: Any, consume: Any) -> None:
    """Its stream is over, with one error, if it has no state, or dies again there."""
    dataset = make(12, (1006,), kill_itself)
    found = consume(DataLoader(dataset, 4, num_workers=2, fetch="workers"))
    errors = [one for one in found if isinstance(one, Exception)]
    assert [type(error) for error in errors] == [WorkerDiedError]
    assert make is Resumable or "iterable dataset" in str(errors[0])
    labels = [i for one in found if one is not errors[0] for i in one.tolist()]
    assert [i for i in labels if i < 1000] == list(range(12))
    rest = [i for i in labels if i >= 1000]
    assert rest == [1000, 1001, 1002, 1003] or (make is not Resumable and not rest)


@pytest.mark.slow
@pytest.mark.parametrize("consume", [outcomes, outcomes_on_uvloop])
@pytest.mark.parametrize("places", [(1006,), (1004, 1007, 9), (1005, 1006, 1311)])
def test_goes_on_in_the_successor(
    places: tuple[int, ...], consume: Any, tmp_path: Path
) -> None:
    """Nothing is lost, doubled or out of turn, however often the worker dies."""
    whole = consume(DataLoader(Resumable(400), 3, num_workers=2))
    dataset = Resumable(400, places, kill_itself, tmp_path)
    found = consume(DataLoader(dataset, 3, num_workers=2))
    assert [batch.tolist() for batch in found] == [batch.tolist() for batch in whole]


class Uneven(FaultyStream):
    """Worker 1 has little to read."""

    def __iter__(self) -> Any:
        worker: Any = torch.utils.data.get_worker_info()
        return iter(range(4 if worker.id else self.n))


def test_a_replica_that_has_ended_may_die() -> None:
    """Nothing is lost with it."""
    iterator = iter(DataLoader(Uneven(200), 4, num_workers=2))
    found = [next(iterator) for _ in range(20)]
    kill_and_wait(pools_of(iterator)._dispatcher.workers[1].pid)
    found += iterator
    labels = [i for batch in found for i in batch.tolist()]
    assert sorted(labels) == sorted([*range(200), *range(4)])
