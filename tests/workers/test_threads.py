"""Worker threads: the same batches as processes, in this process."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from aioloader import DataLoader, Retry, get_worker_info
from beside import beside
from samples import AsyncMap, AsyncStream, SyncMap, SyncStream, collect, labels
from working import Numbers, double_async, first, total_async


def make(dataset: Any, **options: Any) -> Any:
    return DataLoader(dataset, **{"num_workers": 2, "workers": "thread", **options})


@pytest.mark.parametrize("dataset", [SyncStream, AsyncStream])
@pytest.mark.parametrize("drop_last", [False, True])
async def test_threads_read_a_stream_once(dataset: Any, drop_last: bool) -> None:
    """They transform and collate."""
    loader = make(dataset(), batch_size=6, drop_last=drop_last)
    theirs = TorchLoader(SyncStream(), batch_size=6, drop_last=drop_last)
    assert labels(await collect(loader)) == labels(list(theirs))


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (SyncStream(), {}),
        (AsyncStream(), {}),
        (AsyncMap(), {}),
        (SyncMap(), {"transform": double_async}),
        (SyncMap(), {"collate_fn": total_async}),
    ],
    ids=["stream", "async stream", "async map", "transform", "collate"],
)
def test_threads_read_only_plain_maps(dataset: Any, options: dict[str, Any]) -> None:
    """``fetch="workers"`` is refused at once."""
    with pytest.raises(ValueError, match="fetch='workers' needs a map-style dataset"):
        make(dataset, fetch="workers", **options)


def test_threads_have_worker_info() -> None:
    """Number, seed, dataset; the init function runs in each."""
    seen: list[Any] = []

    def init(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        seen.append((worker, info.id, info.num_workers, info.dataset))

    def look(_sample: Any) -> Any:
        info = get_worker_info()
        assert info is not None
        return info.id, info.seed, threading.current_thread().name

    torch.manual_seed(8)
    base_seed = int(torch.empty((), dtype=torch.int64).random_().item())
    torch.manual_seed(8)
    dataset = Numbers(40)
    loader = make(dataset, worker_init_fn=init, transform=look, collate_fn=first)
    infos = list(loader)
    assert {seed - worker for worker, seed, _ in infos} == {base_seed}
    assert {name for *_, name in infos} <= {"aioloader-worker-0", "aioloader-worker-1"}
    assert sorted(seen, key=lambda s: s[0]) == [(k, k, 2, dataset) for k in (0, 1)]
    assert get_worker_info() is None


def test_an_error_in_a_thread_ends_no_iteration() -> None:
    """The exception is the raised object; the next batch arrives."""
    error = LookupError("three")

    class Bad(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise error
            return index

    iterator = iter(make(Bad(8), batch_size=2))
    batches: list[Any] = [next(iterator)]
    with pytest.raises(LookupError) as caught:
        next(iterator)
    assert caught.value is error
    assert "sample index 3" in error.__notes__[0]
    batches += list(iterator)
    assert [batch.tolist() for batch in batches] == [[0, 1], [4, 5], [6, 7]]


def test_threads_reuse_the_memory_of_big_batches() -> None:
    """A loop that drops its batches sees the same few addresses."""

    class Images(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.full((300, 300), index)

    addresses = set()
    for number, batch in enumerate(make(Images(60), batch_size=2)):
        assert batch[:, 7, 9].tolist() == [2 * number, 2 * number + 1]
        addresses.add(batch.data_ptr())
    assert len(addresses) <= 10


@pytest.mark.parametrize("is_async", [False, True])
async def test_close_waits_for_threads_of_a_dropped_iterator(*, is_async: bool) -> None:
    """They may be making a batch."""
    entered, release = threading.Event(), threading.Event()

    class Slow(SyncMap):
        def __getitem__(self, index: int) -> Any:
            if index >= 4:
                entered.set()
                release.wait(10)
            return super().__getitem__(index)

    def left() -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if name.startswith("aioloader-worker")]

    loader = make(Slow(), batch_size=2, prefetch_factor=2)
    iterator = iter(loader)
    await beside(partial(next, iterator))
    await beside(entered.wait)
    del iterator
    assert left()
    closing = asyncio.ensure_future(
        loader.aclose() if is_async else beside(loader.close)
    )
    await asyncio.sleep(0)
    release.set()
    await closing
    assert not left()


class Failing(SyncMap):
    """Fails from the second batch on."""

    def __getitem__(self, index: int) -> Any:
        if index >= 2:
            raise OSError("not now")
        return super().__getitem__(index)


class Patient(Retry):
    def delays(self, rng: Any = None) -> Any:
        yield 3600.0


@pytest.mark.parametrize("workers", ["thread", "process", "executor"])
def test_closing_ends_the_wait_of_a_retry(workers: Any, tmp_path: Path) -> None:
    """A process then ends by itself, and leaves its lifespan."""

    @contextlib.contextmanager
    def lifespan(_dataset: Any) -> Iterator[None]:
        yield
        (tmp_path / "left").touch()

    with ThreadPoolExecutor(1) as executor:
        own: Any = executor if workers == "executor" else workers
        options: Any = {} if own is executor else {"lifespan": lifespan}
        options |= {"num_workers": 1, "workers": own, "retry": Patient()}
        iterator = iter(loader := DataLoader(Failing(8), 2, **options))
        next(iterator)
        loader.close()
    assert own is executor or (tmp_path / "left").exists()
