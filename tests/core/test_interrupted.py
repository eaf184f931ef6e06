"""After an interrupt, the state is that of the last delivered batch.

KeyboardInterrupt comes at any place: in a sample, in the consumer, in a wait.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import uvloop
from torch.utils.data import IterableDataset, TensorDataset

import aioloader
from aioloader import DataLoader, ShuffledIndices
from aioloader.errors import LoaderClosedError
from core.kit import BY, IN_PROCESS, WAYS, make, quiet, step
from samples import AsyncMap, AsyncStream, SyncMap, SyncStream, collect
from stateful import Kept, Plain
from working import AsyncNumbers, Numbers

BATCHES = [[i, i + 1, i + 2, i + 3] for i in range(0, 24, 4)]
HERE = os.getpid()
PACKAGE = os.path.dirname(aioloader.__file__)  # noqa: PTH120  (as frames have it)


class Interrupts:
    """Raise KeyboardInterrupt once, at sample ``at``."""

    def __init__(self, index: int) -> None:
        self.at: int | None = index

    def give(self, index: int) -> int:
        """Return a sample, or raise the interrupt."""
        if index == self.at:
            self.at = None
            raise KeyboardInterrupt
        return index


class Map(Interrupts):
    """A map-style dataset with an interrupt."""

    def __len__(self) -> int:
        return 24

    __getitem__ = Interrupts.give


class Steps(Interrupts, IterableDataset[int]):
    """A stream with an interrupt, which can continue afterwards."""

    def __iter__(self) -> Any:
        return map(self.give, range(24))


def add(batches: list[Any], batch: Any, stop: int) -> None:
    """Append a batch; raise an interrupt once there are ``stop``."""
    batches.append(batch.tolist())
    if len(batches) == stop:
        raise KeyboardInterrupt


async def to_end(loader: Any, batches: list[Any], stop: int) -> None:
    async for batch in loader:
        add(batches, batch, stop)


def for_to_end(loader: Any, batches: list[Any], stop: int) -> None:
    for batch in loader:
        add(batches, batch, stop)


CONSUMERS: dict[str, Any] = {
    "for": ("for", for_to_end),
    "asyncio": ("thread", lambda *args: asyncio.run(to_end(*args))),
    "uvloop": ("thread", lambda *args: uvloop.run(to_end(*args))),
    "caller": ("caller", lambda *args: asyncio.run(to_end(*args))),
}
WARNS = pytest.mark.filterwarnings("ignore:.*has no state_dict:UserWarning")


def interrupted(loader: Any, consume: Any, stop: int = -1) -> tuple[list[Any], Any]:
    """Return what was delivered before the interrupt, and the state after it."""
    batches: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        consume(loader, batches, stop)
    state = loader.state_dict()
    loader.close()
    assert loader.state_dict() == state
    return batches, state


def resumed(new: Callable[[], DataLoader[Any]], state: Any) -> list[Any]:
    """Return the batches of a new loader that resumes from ``state``."""
    loader = new()
    loader.load_state_dict(state)
    return [batch.tolist() for batch in loader]


@WARNS
@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("kind", [Map, Steps])
@pytest.mark.parametrize("index", [0, 5, 8, 23])
def test_an_interrupted_batch_comes_again(index: int, kind: Any, consumer: str) -> None:
    """The batch with the interrupted sample is the first one after resuming."""
    way, consume = CONSUMERS[consumer]
    batches, state = interrupted(make(way, kind(index)), consume)
    assert batches == BATCHES[: index // 4]
    assert resumed(lambda: make("for", kind(-1)), state) == BATCHES[index // 4 :]


KINDS = [Numbers, AsyncNumbers, Plain]


@pytest.mark.slow
@WARNS
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_being_used_was_delivered(kind: Any, consumer: str, by: str) -> None:
    """An interrupt while the consumer works on batch 2 does not repeat that batch."""
    if kind is Plain and by == "processes":
        pytest.skip("batches of workers are others")
    way, consume = CONSUMERS[consumer]
    _, state = interrupted(make(way, kind(24), **BY[by]), consume, 2)
    assert resumed(lambda: make("for", kind(24), **BY[by]), state) == BATCHES[2:]


class Signals(Numbers):
    """Sends SIGINT while the consumer waits for a sample."""

    def __init__(self, index: int) -> None:
        super().__init__(24)
        self.at = index
        self.interrupted = threading.Event()

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            os.kill(HERE, signal.SIGINT)
            self.interrupted.wait(0.2)  # the consumer is interrupted meanwhile
        return index


# With prefetching, a later one may come between two steps: after a batch was returned
# and before it is in the consumer's list.
WAITS = [(IN_PROCESS, 0), (IN_PROCESS, 9), ({"prefetch_factor": 1}, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize(("options", "k"), WAITS, ids=str)
def test_interrupted_waits_lose_nothing(options: Any, consumer: str, k: int) -> None:
    """The state matches the batches that the consumer has received."""
    way, consume = CONSUMERS[consumer]
    batches, state = interrupted(make(way, Signals(k), **options), consume)
    assert batches == BATCHES[: len(batches)]
    assert resumed(lambda: make("for", Numbers(24)), state) == BATCHES[len(batches) :]


def first_of(samples: Any) -> Any:
    return torch.stack([sample[0] for sample in samples])


def interrupt() -> None:
    raise KeyboardInterrupt


class Interrupter:
    """Raises KeyboardInterrupt, or calls ``act``, at the k-th place for a Ctrl-C.

    There a function of the package is entered, or a C function returns to it.
    """

    def __init__(
        self, k: int, *events: str, of: str = "", act: Any = interrupt
    ) -> None:
        self.left = k
        self.events = events
        self.of = of
        self.act = act
        self.where = ""

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        # What a finalizer raises is printed, and does not reach the consumer.
        caller = frame.f_back.f_code.co_filename if frame.f_back else ""
        code = frame.f_code
        is_ours = PACKAGE in code.co_filename and code.co_qualname.endswith(self.of)
        if event not in self.events or not is_ours:
            return
        if not caller.endswith("weakref.py"):
            self.left -= 1
            if self.left == -1:
                self.where = code.co_qualname
                sys.setprofile(None)
                self.act()


def steps(iterator: Any, batches: list[Any], interrupter: Interrupter) -> None:
    """Append all batches until the end or the interrupt."""
    sys.setprofile(interrupter)
    try:
        while (batch := next(iterator, None)) is not None:
            batches.append(batch.tolist())
    finally:
        sys.setprofile(None)


PLACES: dict[str, tuple[Any, dict[str, Any]]] = {
    "inline": (Numbers, {}),
    "stateful": (Kept, {}),
    "ahead": (Numbers, {"prefetch_factor": 2}),
    "tensors": (lambda n: TensorDataset(torch.arange(n)), {"collate_fn": first_of}),
    "threads": (Numbers, BY["threads"]),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_anywhere_in_a_step_loses_no_batch(place: str) -> None:
    """Exactly the batches that were returned count as delivered."""
    expected = [[0, 1], [2, 3], [4, 5], [6, 7]]
    dataset, options = PLACES[place]
    is_whole = place in {"inline", "stateful"}  # else the start is left out
    events = ["call", "c_return"] if is_whole else ["call"]

    def loader() -> DataLoader[Any]:
        return DataLoader(dataset(8), 2, **options)

    for k in range(3000):
        interrupter = Interrupter(k, *events)
        interrupted_loader = loader()
        iterator = iter(interrupted_loader)
        batches = [] if is_whole else [next(iterator).tolist()]
        with contextlib.suppress(KeyboardInterrupt):
            steps(iterator, batches, interrupter)
        state = interrupted_loader.state_dict()
        if place in {"ahead", "threads"}:  # raise rather than lose a batch
            with contextlib.suppress(LoaderClosedError):
                assert batches + [batch.tolist() for batch in iterator] == expected
        interrupted_loader.close()
        rest = resumed(loader, state) if batches != expected else []
        assert batches + rest == expected, (interrupter.where, batches, rest)
        if interrupter.left >= 0:
            assert k > 50
            return
    raise AssertionError("never ran to the end")


def elsewhere(call: Callable[[], object]) -> tuple[threading.Thread, Any]:
    """Return a thread and its start, which waits a moment: the step may hold a lock."""
    thread = threading.Thread(target=call)
    return thread, lambda: (thread.start(), thread.join(0.02))  # type: ignore[func-returns-value]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["ahead", "threads"])
@pytest.mark.parametrize("does", ["close", "list"])
def test_another_thread_may_close_or_iterate_in_a_step(does: str, place: str) -> None:
    """A close ends the loop; two iterating threads share the batches."""
    dataset, options = PLACES[place]
    for k in range(3000):
        began, mine, theirs = list[int](), list[Any](), list[Any]()
        loader = DataLoader(dataset(8), 2, worker_init_fn=began.append, **options)
        iterator: Any = iter(loader)
        call = iterator.close if does == "close" else partial(theirs.extend, iterator)
        thread, act = elsewhere(call)
        steps(iterator, mine, acting := Interrupter(k, "call", act=act))
        if acting.left >= 0:
            assert k > 50
            return
        thread.join()
        assert does == "close" or len(mine + theirs) == 4, acting.where
        assert next(iterator, None) is None, acting.where
        assert len(set(began)) == len(began), acting.where


def test_epochs_begun_in_two_threads_have_different_numbers() -> None:
    """The second thread starts its epoch while the first is numbering its own."""
    loader = DataLoader(Numbers(4), sampler=ShuffledIndices(4))
    first, second = iter(loader), iter(loader)
    thread, act = elsewhere(partial(next, second))
    steps(
        first, [], Interrupter(0, "call", of="EpochNumbers.next_order_epoch", act=act)
    )
    thread.join()
    assert [it.counters and it.counters.epoch for it in (first, second)] == [0, 1]


@pytest.mark.slow
def test_a_signal_handler_may_save_a_state_at_any_time() -> None:
    """The state is that before or after the current batch."""
    for k in range(3000):
        states, batches = list[Any](), list[Any]()
        dataset, options = PLACES["stateful"]
        loader = DataLoader(dataset(8), 2, **options)
        act = lambda: states.append((len(batches), loader.state_dict()))  # noqa: B023, E731
        steps(iter(loader), batches, Interrupter(k, "call", "c_return", act=act))
        if not states:
            assert k > 50
            return
        n, state = states[0]
        rest = resumed(partial(DataLoader[Any], dataset(8), 2, **options), state)
        expected = [batches[n:], batches[n + 1 :], *([batches] * (n > 2))]
        assert rest in expected


@pytest.mark.parametrize("of", ["Feed._account", "ProcessPool._collect_results"])
def test_an_interrupt_with_worker_processes_ends_the_iteration(of: str) -> None:
    """The result being received is lost, so later steps raise an error."""
    with DataLoader(Numbers(24), 2, num_workers=1) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(KeyboardInterrupt):
            steps(iterator, [], Interrupter(0, "call", of=of))
        for _ in range(2):
            with pytest.raises(LoaderClosedError, match="start a new iteration"):
                next(iterator)
        iterator.close()
        assert list(iterator) == []


@pytest.mark.parametrize("of", ["Runner._start", "CpuThread._start", "Runtime.begin"])
def test_an_interrupted_start_is_repeated_by_the_next_step(of: str) -> None:
    """All batches are delivered after it."""
    iterator = iter(DataLoader(Numbers(4), 2, num_workers=1, workers="thread"))
    with pytest.raises(KeyboardInterrupt):
        steps(iterator, [], Interrupter(0, "call", of=of))
    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3]]


@pytest.mark.slow
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [SyncMap, AsyncMap, SyncStream, AsyncStream])
async def test_no_batch_is_in_flight_at_the_end(kind: Any, way: str, by: str) -> None:
    """After a whole epoch, after a close, and after a cancellation."""
    if by == "threads" and kind is SyncStream:
        pytest.skip("as in process")
    loader = make(way, kind(24), **BY[by])
    for whole in (True, False):
        iterator = iter(loader) if way == "for" else aiter(loader)
        while await step(way, iterator) is not None and whole:
            pass
        if not whole:
            await loader.aclose()
        assert loader.stats().in_flight == 0
    if way != "for":
        task = asyncio.create_task(collect(loader))
        await quiet()
        task.cancel()
        await asyncio.wait([task])
        del task
        await loader.aclose()
        assert loader.stats().in_flight == 0
