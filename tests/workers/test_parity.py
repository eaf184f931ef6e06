"""Worker processes deliver what torch's do: batches, order, draws and bounds."""

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
def test_map_datasets_are_read_as_by_torch(
    workers: Any, num_workers: int, name: str, options: dict[str, Any]
) -> None:
    """The same batches and later draws, twice."""
    expected = expected_of(options)
    chosen: Any = {"num_workers": num_workers, "workers": workers, **seeded(options)}
    ours: Any = DataLoader(MAPS[name](), **chosen)
    epochs = [labels(list(ours)) for _ in range(2)]
    assert (epochs, torch.rand(1)) == expected


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
def test_streams_are_read_as_by_torch(name: str, options: dict[str, Any]) -> None:
    """Each worker reads its own; some end early."""
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
        *((kind, "loader") for kind in (AsyncStream, SyncMap, SyncStream)),
    ],
)
async def test_the_loader_can_read_too(num_workers: int, make: Any, fetch: Any) -> None:
    """And async streams always: there is one of them, and workers collate."""
    loader: Any = DataLoader(make(13), 4, num_workers=num_workers, fetch=fetch)
    expected = labels(list(TorchLoader(SyncMap(13), 4)))
    assert labels(await collect(loader)) == expected
    assert labels(await beside(lambda: list(loader))) == expected


@pytest.mark.slow
@pytest.mark.parametrize("drop_last", [False, True])
async def test_async_streams_are_replicated_on_request(drop_last: bool) -> None:
    """With ``fetch="workers"``, like plain ones."""
    options: Any = {"batch_size": 4, "drop_last": drop_last, "num_workers": 2}
    theirs = TorchLoader(Sharded(23), **options)
    expected = await beside(lambda: [index.tolist() for _, index in theirs])
    batches = await collect(DataLoader(AsyncSharded(23), fetch="workers", **options))
    assert labels(batches) == expected
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
def test_functions_may_be_plain_or_async(
    workers: Any, fetch: Any, make: Any, colours: str
) -> None:
    """Wherever samples are read."""
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
async def test_batches_out_of_order_are_complete(make: Any) -> None:
    loader: Any = DataLoader(
        make(40), batch_size=3, num_workers=2, in_order=False, fetch="auto"
    )
    batches = labels(await collect(loader))
    copies = 2 if make is SyncStream else 1
    expected = labels(list(TorchLoader(SyncMap(40), 3))) * copies
    assert sorted(batches) == sorted(expected)


def be_meta(_: int) -> None:
    torch.set_default_device("meta")


def test_workers_collate_on_the_cpu() -> None:
    """A forked worker inherits a default device that it may be unable to use."""
    loader: Any = DataLoader(
        [(1, 0.5), (2, 1.5)], 2, num_workers=1, worker_init_fn=be_meta
    )
    assert [[x.tolist() for x in batch] for batch in loader] == [[[1, 2], [0.5, 1.5]]]


class Counting:
    """A sampler that counts its draws."""

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
def test_the_sampler_is_drawn_from_as_by_torch(
    num_workers: int, factor: int | None
) -> None:
    """Batch by batch, exactly as far ahead."""
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
def test_epochs_draw_from_the_generators_as_torchs(persistent: bool, own: bool) -> None:
    """Persistent workers keep their seed: a second epoch draws none, in both."""
    after = []
    for make in (TorchLoader, DataLoader):
        generator = torch.Generator().manual_seed(5)
        torch.manual_seed(5)
        options: Any = {"num_workers": 1, "persistent_workers": persistent}
        options["generator"] = generator if own else None
        loader: Any = make(Numbers(), 4, shuffle=True, **options)
        epochs = [[batch.tolist() for batch in loader] for _ in range(3)]
        after.append((epochs, torch.rand(1), torch.rand(1, generator=generator)))
        if make is DataLoader:
            loader.close()
        del loader
    assert after[0] == after[1]
