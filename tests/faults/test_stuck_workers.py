"""A stuck worker is named, with its stack, or replaced."""

import threading
from pathlib import Path
from typing import Any

import pytest

from aioloader import DataLoader
from aioloader.errors import BatchTimeoutError, WorkerDiedError
from faulty import (
    CONSUMERS,
    AsyncFaulty,
    Faulty,
    FaultyStream,
    await_ready,
    in_thread,
    kill_and_wait,
    pids_of,
    pools_of,
    sleep_forever,
    spin_in_c,
    start_workers,
    stop_itself,
)

TIMEOUT = 2.0  # more than a batch takes, also beside other work
RESTART: Any = {"num_workers": 2, "timeout": TIMEOUT, "on_timeout": "restart"}
STUCK = [sleep_forever, spin_in_c, stop_itself]


def raised(loader: DataLoader[Any], consume: Any) -> str:
    """Return the message of the timeout; end the stuck workers at once."""
    with pytest.raises(BatchTimeoutError) as caught:
        consume(loader)
    assert caught.value.batch == 1
    for pool in loader._live.pools._kept:
        for pid in pids_of(pool).values():
            kill_and_wait(pid)
    loader.close()
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("consume", CONSUMERS)
@pytest.mark.parametrize("act", STUCK)
def test_a_timeout_names_the_stuck_worker(act: Any, consume: Any) -> None:
    """Batch, worker, pid, stage, and its Python stack, even when it is stopped."""
    loader = DataLoader(
        Faulty(8, (5,), act), 4, num_workers=1, timeout=TIMEOUT, persistent_workers=True
    )
    start_workers(loader)
    text = raised(loader, consume)
    assert f"timed out after {TIMEOUT} seconds: batch 1" in text
    assert "stage 'fetch' of worker 0 (pid " in text
    assert f"in {act.__name__}" in text
    assert ("it is stopped" in text) == (act is stop_itself)


@pytest.mark.slow
def test_a_timeout_names_the_stuck_stage() -> None:
    for stage in ("transform", "collate_fn"):
        options: Any = {stage: stuck, "num_workers": 1, "persistent_workers": True}
        loader = DataLoader[Any](range(8), 4, timeout=TIMEOUT, **options)
        start_workers(loader)
        with pytest.raises(BatchTimeoutError, match=f"stage '{stage[:7]}"):
            list(loader)
        for pid in pids_of(loader._live.pools._kept[0]).values():
            kill_and_wait(pid)
        loader.close()


def stuck(_: Any) -> None:
    """Never return."""
    sleep_forever()


def test_a_timeout_shows_the_stack_of_a_blocked_loop() -> None:
    loader = DataLoader(
        AsyncFaulty(8, (5,), sleep_forever),
        4,
        num_workers=1,
        timeout=TIMEOUT,
        persistent_workers=True,
        concurrency=4,
        prefetch_factor=1,
    )
    text = raised(loader, in_thread)
    assert "in sleep_forever" in text


@pytest.mark.slow
@pytest.mark.parametrize("consume", CONSUMERS)
@pytest.mark.parametrize(
    ("of", "act"), [*((Faulty, act) for act in STUCK), (AsyncFaulty, stop_itself)]
)
def test_a_restart_loses_no_sample(
    of: Any, act: Any, consume: Any, tmp_path: Path, caplog: Any
) -> None:
    """Nor other batches of the stuck worker; the log says why it was killed."""
    dataset = of(48, (5,), act, tmp_path)
    loader = DataLoader[Any](dataset, 4, concurrency=16, **RESTART)
    batches = consume(loader)
    assert [i for batch in batches for i in batch[-1].tolist()] == list(range(48))
    assert "died, by SIGKILL, from on_timeout='restart'; it is" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("consume", CONSUMERS)
def test_a_batch_that_is_stuck_twice_is_an_error(consume: Any) -> None:
    """It is not restarted forever."""
    dataset = Faulty(24, (5,), sleep_forever)
    loader = DataLoader[Any](dataset, 4, persistent_workers=True, **RESTART)
    start_workers(loader)
    with pytest.raises(BatchTimeoutError, match="batch 1"):
        consume(loader)
    for pid in pids_of(loader._live.pools._kept[0]).values():
        kill_and_wait(pid)
    loader.close()


def test_a_batch_that_timed_out_can_arrive_later(tmp_path: Path) -> None:
    """The next step waits for it again."""
    loader = DataLoader(
        Faulty(8, (5,), stop_itself, tmp_path), 4, num_workers=1, timeout=TIMEOUT
    )
    iterator = iter(loader)
    await_ready(pools_of(iterator))
    next(iterator)
    with pytest.raises(BatchTimeoutError):
        next(iterator)
    for pid in pids_of(pools_of(iterator)).values():
        kill_and_wait(pid)
    assert next(iterator)[2].tolist() == [4, 5, 6, 7]


def test_restarting_a_stuck_replica_ends_its_stream() -> None:
    """It cannot be restarted in the middle, so it ends with an error."""
    dataset = FaultyStream(8, (1004,), sleep_forever)
    loader = DataLoader(
        dataset, 4, num_workers=2, timeout=TIMEOUT, on_timeout="restart", in_order=True
    )
    iterator = iter(loader)
    await_ready(pools_of(iterator))
    labels: list[Any] = []
    with pytest.raises(WorkerDiedError):
        for batch in iterator:
            labels += batch.tolist()
    labels += [i for batch in iterator for i in batch.tolist()]
    assert sorted(labels) == [*range(8), *range(1000, 1004)]


def test_a_timeout_shows_the_stack_of_a_stuck_thread() -> None:
    """Threads cannot be killed."""
    released = threading.Event()

    class Stuck(Faulty):
        def happen(self, index: int) -> None:
            if index == 5:
                released.wait()

    loader = DataLoader(Stuck(8), 4, num_workers=1, workers="thread", timeout=TIMEOUT)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(BatchTimeoutError, match="in happen") as caught:
        next(iterator)
    assert "batch 1" in str(caught.value)
    released.set()
    assert next(iterator)[2].tolist() == [4, 5, 6, 7]
