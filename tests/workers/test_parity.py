"""Worker processes give what torch gives: same batches, order, draws and bounds."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import ChainDataset, IterableDataset
from torch.utils.data import DataLoader as TorchLoader

from aioloader import DataLoader
from beside import beside
from loader.test_parity import MAPS, OPTIONS, expected_of, seeded
from samples import AsyncMap, AsyncStream, SyncMap, SyncStream, collect, labels
from working import (
    AsyncNumbers,
    AsyncSharded,
    Numbers,
    Sharded,
    Uneven,
    double,
    double_async,
    total,
    total_async,
)

MANY_WORKERS = "ignore:This DataLoader will create:UserWarning"


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["process", "thread"])
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_map_style(
    workers: Any, num_workers: int, name: str, options: dict[str, Any]
) -> None:
    """Same batches and same later draws as torch over the same samples, twice."""
    expected = expected_of(options)
    chosen: Any = {"num_workers": num_workers, "workers": workers, **seeded(options)}
    ours: Any = DataLoader(MAPS[name](), **chosen)
    found = [labels(list(ours)) for _ in range(2)]
    assert (found, torch.rand(1)) == expected


STREAMS: dict[str, Callable[[], IterableDataset[Any]]] = {
    "sharded": lambda: Sharded(31),
    "unsharded": lambda: SyncStream(9),
    "few first": lambda: Uneven(1, 17, 5),
    "few last": lambda: Uneven(17, 9, 0),
    "none": lambda: Uneven(0, 0, 0),
    "chain": lambda: ChainDataset([Sharded(7), SyncStream(3)]),
}


@pytest.mark.slow
@pytest.mark.filterwarnings(MANY_WORKERS)
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1, "batch_size": 4},
        {"num_workers": 2, "batch_size": 4},
        {"num_workers": 2, "batch_size": 4, "drop_last": True},
        {"num_workers": 3, "batch_size": 2, "prefetch_factor": 1},
        {"num_workers": 3, "batch_size": 5, "prefetch_factor": 4},
        {"num_workers": 2, "batch_size": None},
    ],
    ids=str,
)
def test_streams(name: str, options: dict[str, Any]) -> None:
    """Each worker reads its own; the order is torch's, also when some end early."""
    theirs, ours = [
        [index.tolist() if torch.is_tensor(index) else index for _, index in loader]
        for loader in (
            TorchLoader(STREAMS[name](), **options),
            DataLoader(STREAMS[name](), **options),
        )
    ]
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(
    ("make", "fetch"),
    [
        (AsyncStream, "auto"),
        *((one, "loader") for one in (AsyncStream, SyncMap, SyncStream)),
    ],
)
async def test_the_loader_may_read(num_workers: int, make: Any, fetch: Any) -> None:
    """An async stream, or what it is told to: there is one, and workers collate."""
    loader: Any = DataLoader(make(13), 4, num_workers=num_workers, fetch=fetch)
    expected = labels(list(TorchLoader(SyncMap(13), 4)))
    assert labels(await collect(loader)) == expected
    assert labels(await beside(lambda: list(loader))) == expected


@pytest.mark.slow
@pytest.mark.parametrize("drop_last", [False, True])
async def test_async_streams_in_workers(drop_last: bool) -> None:
    """Replicated like plain ones when that is asked for."""
    options: Any = {"batch_size": 4, "drop_last": drop_last, "num_workers": 2}
    theirs = TorchLoader(Sharded(23), **options)
    expected = await beside(lambda: [index.tolist() for _, index in theirs])
    found = await collect(DataLoader(AsyncSharded(23), fetch="workers", **options))
    assert labels(found) == expected
    twice = await collect(DataLoader(AsyncStream(4), fetch="workers", **options))
    assert labels(twice) == [[0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "fetch"),
    [
        ("process", "loader"),
        ("process", "workers"),
        ("thread", "loader"),
        ("thread", "auto"),
    ],
)
@pytest.mark.parametrize("make", [Numbers, AsyncNumbers])
@pytest.mark.parametrize("colours", ["ss", "sa", "as", "aa"])
def test_functions_of_any_colour(
    workers: Any, fetch: Any, make: Any, colours: str
) -> None:
    """A transform and a collate function, sync or async, wherever samples are read."""
    loader: Any = DataLoader(
        make(10),
        batch_size=4,
        num_workers=2,
        workers=workers,
        fetch=fetch,
        transform=double if colours[0] == "s" else double_async,
        collate_fn=total if colours[1] == "s" else total_async,
    )
    assert list(loader) == [12, 44, 34]


@pytest.mark.slow
@pytest.mark.parametrize("make", [SyncMap, AsyncMap, SyncStream, AsyncStream])
async def test_unordered(make: Any) -> None:
    """The same batches, as they complete."""
    loader: Any = DataLoader(
        make(40), batch_size=3, num_workers=2, in_order=False, fetch="auto"
    )
    found = labels(await collect(loader))
    copies = 2 if make is SyncStream else 1
    expected = labels(list(TorchLoader(SyncMap(40), 3))) * copies
    assert sorted(found) == sorted(expected)


def be_meta(_: int) -> None:
    torch.set_default_device("meta")


def test_workers_collate_on_the_cpu() -> None:
    """A forked one inherits a default device, which may be one that it cannot use."""
    loader: Any = DataLoader(
        [(1, 0.5), (2, 1.5)], 2, num_workers=1, worker_init_fn=be_meta
    )
    assert [[x.tolist() for x in batch] for batch in loader] == [[[1, 2], [0.5, 1.5]]]


class Counting:
    """A sampler that counts what was drawn from it."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        for index in range(self.n):
            self.drawn += 1
            yield index


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("factor", [None, 1, 3])
def test_no_more_is_requested_than_torch_would(
    num_workers: int, factor: int | None
) -> None:
    """The sampler is drawn from batch by batch, exactly so far ahead."""
    drawn = []
    for make in (TorchLoader, DataLoader):
        sampler = Counting(40)
        options: Any = {"num_workers": num_workers, "prefetch_factor": factor}
        loader: Any = make(Numbers(40), 2, sampler=sampler, **options)
        iterator = iter(loader)
        steps = []
        for _ in range(4):
            next(iterator)
            steps.append(sampler.drawn)
        drawn.append(steps)
        del iterator
    assert drawn[1] == drawn[0]
    assert drawn[1][0] == 2 * ((factor or 2) * num_workers + 1)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_draws_of_an_epoch_are_torchs(persistent: bool, own: bool) -> None:
    """Workers that persist keep their seed: a second epoch draws none, in both."""
    after = []
    for make in (TorchLoader, DataLoader):
        generator = torch.Generator().manual_seed(5)
        torch.manual_seed(5)
        options: Any = {"num_workers": 1, "persistent_workers": persistent}
        options["generator"] = generator if own else None
        loader: Any = make(Numbers(), 4, shuffle=True, **options)
        found = [[batch.tolist() for batch in loader] for _ in range(3)]
        after.append((found, torch.rand(1), torch.rand(1, generator=generator)))
        if make is DataLoader:
            loader.close()
        del loader
    assert after[0] == after[1]
