"""Loaders whose numbers are "auto", or that bound the bytes in flight."""

import asyncio
import copy
import pickle
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from aioloader import DataLoader
from aioloader._base.records import NOT_MADE
from aioloader._pipeline import fetchers as lanes_module
from aioloader._pipeline import tuner as tuner_module
from aioloader._pipeline.autotune import Controller
from aioloader._pipeline.batch_task import BatchTask, Window
from aioloader._pipeline.fetchers import FetcherPool
from aioloader._pipeline.tuner import Tuner, Tuning
from loader.states import left_at
from observe.showing import Clock
from samples import AsyncMap, AsyncStream, SyncMap, SyncStream, labels
from working import Drawing, double


def indices(batches: Iterable[Any]) -> list[int]:
    return [index for batch in labels(list(batches)) for index in batch]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of tuner and lanes."""
    clock = Clock()
    for module in (tuner_module, lanes_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


def tuner(tuning: Tuning, **options: Any) -> Tuner:
    """Return a tuner for one reader and batches of eight samples."""
    given: dict[str, Any] = {"concurrency": None, "prefetch": None, "given": 2}
    given |= {"readers": 1, "batch_size": 8, "prefetch_bytes": None}
    return Tuner(tuning=tuning, **(given | options))


# -- reads and batches in flight ------------------------------------------------------


class Store:
    """Reads take as long as from a store that serves ``knee`` of them at a time."""

    def __init__(self, clock: Clock, knee: int) -> None:
        self.clock = clock
        self.knee = knee
        self.under_way = self.most = 0

    async def get(self, index: int) -> int:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for _ in range(20):
            await asyncio.sleep(0)
        # As many reads end in a latency as are under way.
        latency = 0.03 * max(1.0, self.under_way / self.knee)
        self.clock.now += latency / self.under_way
        self.under_way -= 1
        return index


async def read_all(store: Store, controller: Controller, batches: int) -> list[Any]:
    """Return the samples of ``batches`` batches, which are requested all at once."""
    tuned = tuner(Tuning(), concurrency=controller)
    tasks = [
        BatchTask(number, range(number * 8, number * 8 + 8), samples=[None] * 8)
        for number in range(batches)
    ]

    async def read(task: BatchTask, position: int) -> None:
        task.samples[position] = await store.get(task.indices[position])

    def tune(began: float, is_busy: bool) -> int:
        return tuned.note_read(began, failures=0, is_busy=is_busy)

    lanes = FetcherPool(controller.value, tune)
    await asyncio.gather(*(lanes.run(task, read, 8) for task in tasks))
    await lanes.aclose()
    return [sample for task in tasks for sample in task.samples]


def test_prefetching_grows_while_that_is_faster(clock: Clock) -> None:
    """The more are requested, the faster batches come, up to twelve."""
    controller = Controller("prefetch_factor", 2, 1, 32)
    tuned = tuner(Tuning(), prefetch=controller)
    window = tuned.begin(Window(2))
    waited = 0.0
    for _ in range(400):
        seconds = 0.1 / min(12, window.batches)
        clock.now, waited = clock.now + seconds, waited + seconds / 2
        window = tuned.note_batch(b"batch", window, waited)
        assert window.batches == controller.value
    assert 10 <= controller.value <= 16


def test_prefetch_bytes_bounds_async_datasets_too() -> None:
    """However many samples could be read at a time."""
    loader = DataLoader(AsyncMap(200), 4, prefetch_bytes=200, concurrency="auto")
    for _ in loader:  # four samples of three float32 and an int64
        assert loader.stats().in_flight <= 2
    assert loader._live.tuning.controllers["concurrency"].value <= 200 // 20


async def test_concurrency_grows_to_what_the_store_serves(clock: Clock) -> None:
    """Each sample is read once."""
    store, controller = Store(clock, 100), Controller("concurrency", 16, 1, 1024)
    assert await read_all(store, controller, 400) == list(range(3200))
    assert controller.value >= 90
    assert store.most <= 256


# -- bytes ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [True, False])
def test_readers_take_turns_if_only_one_batch_fits(in_order: bool) -> None:
    loader = DataLoader(
        SyncStream(12), 2, num_workers=2, prefetch_bytes=1, in_order=in_order
    )
    assert sorted(indices(loader)) == sorted([*range(12)] * 2)


# -- workers -----------------------------------------------------------------------


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """There are twelve cores."""
    monkeypatch.setattr("aioloader._loader.auto.cores", lambda: 12)
    return iter(())


@pytest.mark.parametrize("has_gil", [True, False])
def test_auto_workers_are_threads_without_the_gil(
    has_gil: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless other arguments need processes."""
    monkeypatch.setattr("aioloader._loader.auto.has_gil", lambda: has_gil)
    loader = DataLoader(SyncMap(), num_workers="auto")
    assert loader.workers == ("process" if has_gil else "thread")
    asked: list[dict[str, Any]] = [{"rng": "batch"}, {"fetch": "workers"}]
    for options in (*asked, {"persistent_workers": True}):
        loader = DataLoader(SyncMap(), num_workers="auto", **options)
        assert loader.workers == "process"


@pytest.mark.usefixtures("many_cores")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_the_dataset_decides_on_auto_workers() -> None:
    """None if nothing would run in them; otherwise one per core, at first eight."""
    tensors = TensorDataset(torch.zeros(4))
    assert DataLoader(tensors, num_workers="auto").num_workers == 0
    assert DataLoader(AsyncMap(), num_workers="auto").num_workers == 0
    assert DataLoader(AsyncStream(), num_workers="auto").num_workers == 0
    assert DataLoader(SyncMap(), num_workers="auto").num_workers == 8
    plain = DataLoader(AsyncMap(), num_workers="auto", transform=double)
    assert plain.num_workers == 8
    # Constructed again from its attributes, with torch's functions filled in.
    again = DataLoader(AsyncMap(), num_workers="auto")
    again = DataLoader(
        again.dataset, num_workers=again.num_workers, collate_fn=again.collate_fn
    )
    assert repr(again.num_workers) == "auto(0)"


def deliver(epoch: Any, rate: int) -> None:
    """Record ``rate`` batches per second for 100 s, half of which are waited for."""
    for number in range(100 * rate + 1):
        taken = 1 + number / rate
        record = number, taken - 0.5 / rate, taken, 0, 1, NOT_MADE
        epoch.counters.records.append(record)


@pytest.mark.usefixtures("many_cores")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_auto_workers_change_between_epochs() -> None:
    """More if the consumer waited; fewer after deaths; at most one per core."""
    loader = DataLoader(SyncMap(), num_workers="auto", workers="thread")
    live, seen = loader._live, []
    for rate, deaths in ((8, 0), (12, 0), (12, 0), (12, 1), (12, 1)):
        iter(loader)
        seen.append(int(loader.num_workers))
        live.epoch = live.draw(loader._options(), None)
        deliver(live.epoch, rate)
        live.pools.supervisors.deaths = deaths
    assert seen == [8, 12, 12, 12, 6]


@pytest.mark.slow
def test_auto_keeps_persistent_workers() -> None:
    """New ones would draw another seed and order."""
    loader = DataLoader(
        Drawing(32), 4, num_workers="auto", persistent_workers=True, shuffle=True
    )
    torch.manual_seed(0)
    first, second = list(loader), list(loader)
    deliver(loader._live.epoch, 1)
    before = loader.num_workers
    iterator = iter(loader)
    assert loader.num_workers is before
    del iterator
    loader.close()
    torch.manual_seed(0)
    with DataLoader(
        Drawing(32), 4, num_workers=1, persistent_workers=True, shuffle=True
    ) as fixed:
        assert str([first, second]) == str([list(fixed), list(fixed)])


class Plain(IterableDataset[int]):
    """A stream of which each worker would read its own copy."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_auto_workers_do_not_repeat_a_loaders_stream() -> None:
    """They only collate, so their number does not matter."""
    loader = DataLoader(Plain(), 4, num_workers="auto", fetch="loader")
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_auto_workers_of_an_executor_lose_nothing() -> None:
    """ "auto" chooses how many batches it makes at once."""
    with ThreadPoolExecutor(2) as executor:
        loader = DataLoader(SyncMap(), 4, num_workers="auto", workers=executor)
        assert loader.num_workers >= 1
        assert indices(loader) == [*range(20)]


# -- drop-in ------------------------------------------------------------

_ALL: dict[str, Any] = dict.fromkeys(
    ("num_workers", "prefetch_factor", "concurrency"), "auto"
)


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [SyncMap(24), AsyncMap(24)])
def test_auto_survives_copying_a_loader(dataset: Any) -> None:
    """Frameworks construct, compare, copy and pickle loaders."""
    loader = DataLoader(dataset, 4, **_ALL)
    known = {name: getattr(loader, name) for name in _ALL}
    assert all(repr(value).startswith("auto(") for value in known.values())
    assert loader.num_workers >= 0
    made = DataLoader(loader.dataset, 4, **known)
    for again in (made, copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert all(repr(getattr(again, name)).startswith("auto(") for name in _ALL)
        assert indices(again) == [*range(24)]


def test_auto_can_be_assigned_later() -> None:
    """It counts from the next iteration on."""
    loader: Any = DataLoader(AsyncMap(24), 4)
    loader.concurrency = "auto"
    assert indices(loader) == [*range(24)]
    assert repr(loader.concurrency) == "auto(32)"
    loader.concurrency = 5
    assert len(list(loader)) == 6
    assert loader.concurrency == 5


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["auto", 2])
def test_a_state_of_auto_fits_other_numbers(workers: Any) -> None:
    options = _ALL | {"num_workers": workers}
    loader = DataLoader(SyncMap(40), 4, **options)
    state = left_at(loader, 3)
    resumed = DataLoader(SyncMap(40), 4, num_workers=1)
    resumed.load_state_dict(state)
    assert indices(resumed) == [*range(12, 40)]
