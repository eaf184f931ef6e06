"""Workers on a Ray cluster: the same batches as any workers, and their failures."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import get_worker_info as torch_worker_info

from aioloader import DataLoader, RayWorkers, Skip, get_worker_info
from aioloader.errors import (
    BatchTimeoutError,
    WorkerDiedError,
    WorkerError,
    WorkerStartError,
)
from faulty import AsyncFaulty, Faulty, kill_and_wait, kill_itself, outcomes
from lifespans import on_loop, plain
from samples import AsyncStream, collect, labels
from workers.ray_cluster import begun, cluster, nothing_is_left, wait_for
from workers.test_failures import Fragile, Stubborn
from workers.test_lifespan import LoggedAsyncMap, LoggedMap, lives
from working import AsyncDrawing, Drawing, Numbers, draw, draw_own, first, pid

__all__ = ["cluster", "nothing_is_left"]

pytestmark = [
    pytest.mark.slow,  # an actor imports torch
    pytest.mark.one_loop,  # actors have their own
    pytest.mark.usefixtures("cluster"),
]
BATCH: dict[str, Any] = {"num_workers": 0, "rng": "batch"}


def make(dataset: Any, size: int = 4, actors: int = 1, **options: Any) -> Any:
    """Return a loader with actors; a separate generator draws its base seed."""
    generator = torch.Generator().manual_seed(3)
    options = {"workers": RayWorkers(actors), "generator": generator, **options}
    return DataLoader(dataset, size, **options)


def same(value: Any, expected: Any) -> bool:
    """Return whether batches are equal to the bit."""
    if isinstance(value, torch.Tensor):
        return torch.equal(value, expected)
    if not isinstance(value, (list, tuple)):
        return bool(value == expected)
    return len(value) == len(expected) and all(map(same, value, expected))


# -- the same as other workers ------------------------------------------------------


class Asking(Drawing):
    """Draws, and checks the worker's info."""

    def __getitem__(self, index: int) -> Any:
        ours: Any = get_worker_info()
        theirs: Any = torch_worker_info()
        if ours is not None:
            assert ours.dataset is theirs.dataset
            assert (ours.id, ours.num_workers, ours.seed) == (
                (theirs.id, theirs.num_workers, theirs.seed)
            )
            assert (ours.num_workers, torch.get_num_threads()) == (2, 1)
        return super().__getitem__(index)


def test_batches_of_actors_are_those_of_processes() -> None:
    """Order and augmentations, epoch by epoch, with lambdas and local functions."""
    options: dict[str, Any] = {
        "shuffle": True,
        "transform": lambda sample: (*sample, draw()),
        "collate_fn": lambda samples: [*samples, draw()],
    }
    runs: list[Any] = []
    for workers in ({"num_workers": 2, "workers": "process"}, {}):
        options["persistent_workers"] = True
        with make(Asking(30), actors=2, **{**options, **workers}) as loader:
            runs.append([list(loader) for _ in range(2)])
    assert same(runs[1], runs[0])
    options["persistent_workers"] = False
    alone = make(Drawing(30), workers="process", **options, **BATCH)
    assert same(runs[1][0], list(alone))


async def test_actors_run_coroutines_of_many_samples() -> None:
    """On a loop, each with its own generators."""

    async def augment(sample: Any) -> Any:
        return *sample, draw_own()

    options: dict[str, Any] = {"transform": augment, "rng": "sample"}
    batches = await collect(make(AsyncDrawing(24), in_order=False, **options))
    options.update(workers="process", num_workers=2)
    expected = await collect(make(AsyncDrawing(24), **options))
    assert same(sorted(batches, key=lambda batch: batch[0][0].item()), expected)


async def test_streams_are_read_by_the_loader() -> None:
    """Once; actors transform and collate the samples."""
    here = os.getpid()

    def check(sample: Any) -> Any:
        assert os.getpid() != here
        sample[0].add_(0)
        return sample

    loader = make(AsyncStream(), 6, transform=check)
    expected = labels(list(TorchLoader(range_of_samples(), 6)))
    assert labels(await collect(loader)) == expected


def range_of_samples() -> Any:
    return [(torch.full((3,), float(index)), index) for index in range(20)]


def test_actors_resume_a_state_of_processes() -> None:
    """The rest is equal to the bit, with a mask, too."""
    options: dict[str, Any] = {"shuffle": True, "rank": 1, "world_size": 2}
    options.update(tail="pad", transform=lambda sample: (*sample, draw()))
    first_half = make(Drawing(26), workers="process", num_workers=1, **options)
    iterator = iter(first_half)
    next(iterator)
    state = first_half.state_dict()
    expected = list(iterator)
    loader = make(Drawing(26), **options)
    loader.load_state_dict(state)
    assert same(list(loader), expected)


def test_big_batches_are_writable_copies() -> None:
    """They are copied out of Ray's store, and can be kept."""
    pixels = np.arange(8 * 300_000, dtype=np.uint8).reshape(8, -1)

    class Images(Numbers):
        def __getitem__(self, index: int) -> Any:
            with pytest.raises(ValueError, match="read-only"):
                pixels[index, 0] = 1
            return torch.from_numpy(pixels[index].copy()), weights.sum()

    weights = torch.ones(100_000)
    batches = list(make(Images(8), 2))
    for number, (batch, total) in enumerate(batches):
        batch.add_(1)
        assert torch.equal(batch[1], torch.from_numpy(pixels[2 * number + 1]) + 1)
        assert total.tolist() == [100_000] * 2


# -- the user's errors --------------------------------------------------------------


class Bad(Numbers):
    """Fails at index 5."""

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise LookupError("at 5")
        return index


def odd(samples: list[Any]) -> Any:
    """Return, for some batches, what cannot be sent or received."""
    if samples[0] == 8:
        return (x for x in samples)
    return Fragile() if samples[0] == 12 else samples


def test_errors_keep_their_type_and_gain_notes() -> None:
    """Stage, batch, index, worker, remote traceback; iteration continues."""
    sampler: Any = [*range(16), Stubborn(16), 17]
    results = outcomes(make(Bad(20), collate_fn=odd, sampler=sampler))
    batch, lookup, unsent, unreceived, request = results
    assert batch == [0, 1, 2, 3]
    assert (type(lookup), lookup.args) == (LookupError, ("at 5",))
    text = "\n".join(lookup.__notes__)
    assert "stage 'fetch' of epoch 0, batch 1, sample index 5" in text
    assert "Caught LookupError in DataLoader worker process 0" in text
    assert "in __getitem__" in text
    assert type(unsent) is TypeError
    assert "stage 'send' of epoch 0, batch 2" in unsent.__notes__[0]
    assert type(unreceived) is WorkerError
    assert isinstance(unreceived.__cause__, LookupError)
    assert str(request) == "cannot pickle me"


def test_failures_are_skipped_and_listed() -> None:
    """The budget is the loader's."""
    loader = make(Bad(12), on_error=Skip(at_most=1))
    batches = [batch.tolist() for batch in loader]
    assert batches == [[0, 1, 2, 3], [4, 6, 7], [8, 9, 10, 11]]
    assert [failure.index for failure in loader.skipped] == [5]


@pytest.mark.fuzz
def test_an_error_of_an_init_function_is_raised() -> None:
    def init(worker: int) -> None:
        raise LookupError(f"worker {worker}")

    with pytest.raises(LookupError, match="worker 0"):
        list(make(Numbers(), worker_init_fn=init))


def test_what_cannot_be_pickled_is_named() -> None:
    """The message is that of worker processes."""
    lock = asyncio.new_event_loop
    frame = sys._getframe()
    with pytest.raises(WorkerStartError, match=r"transform\.<frame> cannot be"):
        list(make(Numbers(), transform=lambda value: (frame, lock)))


# -- deaths -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make_dataset", [Faulty, pytest.param(AsyncFaulty, marks=pytest.mark.fuzz)]
)
def test_batches_of_a_dead_actor_are_made_again(
    make_dataset: Any, tmp_path: Path
) -> None:
    """Once each, in order, with the same augmentations."""
    loader = make(make_dataset(24, (9,), kill_itself, tmp_path), actors=2)
    expected = make(make_dataset(24), workers="process", num_workers=2)
    assert same(list(loader), list(expected))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.fuzz
@pytest.mark.parametrize("make_dataset", [Faulty, AsyncFaulty])
def test_only_the_batch_that_kills_is_an_error(make_dataset: Any) -> None:
    """After two actors; other batches arrive, even those made at the same time."""
    batches = outcomes(make(make_dataset(20, (13,))))
    error = batches[3]
    assert isinstance(error, WorkerDiedError)
    assert isinstance(error, RuntimeError)
    assert (error.batch, error.worker) == (3, 0)
    assert f"(pid(s) {error.pid} on " in str(error)
    assert "batch 3 in hand, sample indices [12, 13, 14, 15]" in str(error)
    assert "Ray says: The actor " in str(error)
    kept = [i for batch in batches if batch is not error for i in batch[-1].tolist()]
    assert kept == [*range(12), *range(16, 20)]


@pytest.mark.fuzz
def test_persistent_actors_are_kept_and_replaced() -> None:
    """The same process serves each epoch; after it is killed, another does."""
    loader = make(Numbers(), persistent_workers=True, transform=pid, collate_fn=first)
    with loader:
        (actor,) = {*loader, *loader}
        kill_and_wait(actor)
        (replacement,) = set(loader)
    assert replacement != actor


@pytest.mark.fuzz
def test_a_stuck_actor_is_restarted(tmp_path: Path) -> None:
    """It is killed after ``timeout``, and another one makes its batch."""
    os.mkfifo(tmp_path / "fifo")
    mark = tmp_path / "mark"
    mark.touch()

    def stick(value: int) -> int:
        if value == 3 and not mark.exists():
            mark.touch()
            wait_for(tmp_path / "fifo")
        return value

    loader = make(Numbers(), 2, 2, transform=stick, persistent_workers=True)
    with loader:
        while begun(loader) < 2:
            assert len(list(loader)) == 6
        mark.unlink()
        loader.timeout, loader.on_timeout = 1, "restart"
        assert [batch.tolist() for batch in loader][1] == [2, 3]


# -- placing actors -----------------------------------------------------------------


def test_actors_with_room_do_all_the_work() -> None:
    """The cluster has room for one of two actors."""
    loader = make(Numbers(), workers=RayWorkers(2, resources={"CPU": 3}))
    assert torch.cat(list(loader)).tolist() == list(range(12))


@pytest.mark.fuzz
def test_a_timeout_says_what_room_is_missing(cluster: Any) -> None:
    """What each actor needs, and what there is."""
    workers = RayWorkers(2, resources={"nowhere": 1})
    loader = make(Numbers(), workers=workers, timeout=0.5)
    iterator = iter(loader)
    with pytest.raises(BatchTimeoutError) as caught:
        next(iterator)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "0 of 2 are placed" in text
    assert "1 nowhere (0 of 0 free)" in text
    iterator.close()
    assert cluster.is_initialized()


async def test_a_break_leaves_no_actor() -> None:
    """The fixture checks it."""
    async for batch in make(Numbers(1000), 1, prefetch_factor=8):
        assert batch.item() == 0
        break


def test_a_second_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="already connected to the Ray cluster at"):
        list(make(Numbers(), workers=RayWorkers(1, address="10.0.0.1:6379")))


# -- lifespans ----------------------------------------------------------------------


class Guarded(LoggedMap):
    """A dataset that must not be entered itself."""

    def __enter__(self) -> Any:
        raise AssertionError("entered")

    def __exit__(self, *_exc: object) -> None:
        raise AssertionError("exited")


@pytest.mark.parametrize(
    ("make", "lifespan"),
    [pytest.param(Guarded, plain, marks=pytest.mark.fuzz), (LoggedAsyncMap, on_loop)],
)
def test_actors_enter_a_lifespan_once(make: Any, lifespan: Any, tmp_path: Path) -> None:
    """It leaves it at its end."""
    path = tmp_path / "log"
    workers = RayWorkers(1)
    with DataLoader(make(path), 4, workers=workers, lifespan=lifespan) as loader:
        iterator = iter(loader)
        assert labels(list(iterator))[1] == [4, 5, 6, 7]
        iterator.close()
    (events,) = lives(path).values()
    assert events == ["enter", "read", "leave"]


def test_an_error_on_entering_a_lifespan_is_raised(tmp_path: Path) -> None:
    """No actor is placed again."""

    def refuse(dataset: Any) -> Any:
        dataset.note("enter")
        raise ConnectionRefusedError("no such server")

    path = tmp_path / "log"
    loader = DataLoader(LoggedMap(path), 4, workers=RayWorkers(1), lifespan=refuse)
    with pytest.raises(ConnectionRefusedError, match="no such server") as caught:
        list(loader)
    assert any(
        "stage 'lifespan', entering it" in note for note in caught.value.__notes__
    )
    loader.close()
    assert list(lives(path).values()) == [["enter"]]
