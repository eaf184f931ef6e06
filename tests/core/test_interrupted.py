"""A loader that was interrupted is at its last delivered batch, and counts nothing.

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
    """Interrupts once, at a sample."""

    def __init__(self, at: int) -> None:
        self.at: int | None = at

    def give(self, index: int) -> int:
        """Return a sample, or be interrupted."""
        if index == self.at:
            self.at = None
            raise KeyboardInterrupt
        return index


class Map(Interrupts):
    """Samples that are interrupted."""

    def __len__(self) -> int:
        return 24

    __getitem__ = Interrupts.give


class Steps(Interrupts, IterableDataset[int]):
    """A stream that is interrupted, and goes on from its place."""

    def __iter__(self) -> Any:
        return map(self.give, range(24))


def add(found: list[Any], batch: Any, at: int) -> None:
    """Add a batch to ``found``; be interrupted after ``at`` of them."""
    found.append(batch.tolist())
    if len(found) == at:
        raise KeyboardInterrupt


async def to_end(loader: Any, found: list[Any], at: int) -> None:
    """Add all by ``async for``."""
    async for batch in loader:
        add(found, batch, at)


def for_to_end(loader: Any, found: list[Any], at: int) -> None:
    """The same, by ``for``."""
    for batch in loader:
        add(found, batch, at)


CONSUMERS: dict[str, Any] = {
    "for": ("for", for_to_end),
    "asyncio": ("thread", lambda *args: asyncio.run(to_end(*args))),
    "uvloop": ("thread", lambda *args: uvloop.run(to_end(*args))),
    "caller": ("caller", lambda *args: asyncio.run(to_end(*args))),
}
WARNS = pytest.mark.filterwarnings("ignore:.*has no state_dict:UserWarning")


def interrupted(loader: Any, consume: Any, at: int = -1) -> tuple[list[Any], Any]:
    """Return what was delivered before the interrupt, and the state after it."""
    found: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        consume(loader, found, at)
    state = loader.state_dict()
    loader.close()
    assert loader.state_dict() == state
    return found, state


def resumed(make_one: Callable[[], DataLoader[Any]], state: Any) -> list[Any]:
    """Return what a new loader delivers from a state on."""
    loader = make_one()
    loader.load_state_dict(state)
    return [batch.tolist() for batch in loader]


@WARNS
@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("kind", [Map, Steps])
@pytest.mark.parametrize("at", [0, 5, 8, 23])
def test_an_interrupt_in_a_sample(at: int, kind: Any, consumer: str) -> None:
    """The batch under way was not delivered: it is the next one."""
    way, consume = CONSUMERS[consumer]
    found, state = interrupted(make(way, kind(at)), consume)
    assert found == BATCHES[: at // 4]
    assert resumed(lambda: make("for", kind(-1)), state) == BATCHES[at // 4 :]


KINDS = [Numbers, AsyncNumbers, Plain]


@pytest.mark.slow
@WARNS
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_in_the_consumer(kind: Any, consumer: str, by: str) -> None:
    """The batch that it works on was delivered."""
    if kind is Plain and by == "processes":
        pytest.skip("batches of workers are others")
    way, consume = CONSUMERS[consumer]
    _, state = interrupted(make(way, kind(24), **BY[by]), consume, 2)
    assert resumed(lambda: make("for", kind(24), **BY[by]), state) == BATCHES[2:]


class Signals(Numbers):
    """Ctrl-C while the consumer waits for a sample."""

    def __init__(self, at: int) -> None:
        super().__init__(24)
        self.at = at
        self.interrupted = threading.Event()

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            os.kill(HERE, signal.SIGINT)
            self.interrupted.wait(0.2)  # the consumer is interrupted meanwhile
        return index


# Ahead of the consumer, a later one may come between two of its steps, when a batch was
# returned and is not yet in its list.
WAITS = [(IN_PROCESS, 0), (IN_PROCESS, 9), ({"prefetch_factor": 1}, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize(("options", "at"), WAITS, ids=str)
def test_an_interrupt_in_a_wait(options: Any, consumer: str, at: int) -> None:
    """The state is that of what the consumer has seen, and the rest follows."""
    way, consume = CONSUMERS[consumer]
    found, state = interrupted(make(way, Signals(at), **options), consume)
    assert found == BATCHES[: len(found)]
    assert resumed(lambda: make("for", Numbers(24)), state) == BATCHES[len(found) :]


def first_of(samples: Any) -> Any:
    """Return the first column."""
    return torch.stack([sample[0] for sample in samples])


def interrupt() -> None:
    """Do as Ctrl-C does."""
    raise KeyboardInterrupt


class Interrupter:
    """Raises KeyboardInterrupt, or acts, at the k-th place where Ctrl-C can.

    A function of the package is entered, or (``c_return``) one of C returns to it.
    """

    def __init__(
        self, at: int, *events: str, of: str = "", act: Any = interrupt
    ) -> None:
        self.left = at
        self.events = events
        self.of = of
        self.act = act
        self.where = ""

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        # What a finalizer raises is printed, and lost to whoever iterates.
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


def steps(iterator: Any, found: list[Any], interrupter: Interrupter) -> None:
    """Iterate to the end, or to the interrupt."""
    sys.setprofile(interrupter)
    try:
        while (batch := next(iterator, None)) is not None:
            found.append(batch.tolist())
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
def test_an_interrupt_anywhere_in_a_step(place: str) -> None:
    """What was returned was delivered, and nothing else; it is whole, or raises."""
    expected = [[0, 1], [2, 3], [4, 5], [6, 7]]
    of, options = PLACES[place]
    is_whole = place in {"inline", "stateful"}  # else a start is not looked at
    events = ["call", "c_return"] if is_whole else ["call"]

    def loader() -> DataLoader[Any]:
        return DataLoader(of(8), 2, **options)

    for at in range(3000):
        interrupter = Interrupter(at, *events)
        one = loader()
        iterator = iter(one)
        found = [] if is_whole else [next(iterator).tolist()]
        with contextlib.suppress(KeyboardInterrupt):
            steps(iterator, found, interrupter)
        state = one.state_dict()
        if place in {"ahead", "threads"}:  # nothing is lost in silence, or waited for
            with contextlib.suppress(LoaderClosedError):
                assert found + [batch.tolist() for batch in iterator] == expected
        one.close()
        rest = resumed(loader, state) if found != expected else []
        assert found + rest == expected, (interrupter.where, found, rest)
        if interrupter.left >= 0:
            assert at > 50
            return
    raise AssertionError("never ran to the end")


def elsewhere(call: Callable[[], object]) -> tuple[threading.Thread, Any]:
    """Return a thread, and what starts it; where the step has a lock, it waits."""
    other = threading.Thread(target=call)
    return other, lambda: (other.start(), other.join(0.02))  # type: ignore[func-returns-value]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["ahead", "threads"])
@pytest.mark.parametrize("does", ["close", "list"])
def test_another_thread_anywhere_in_a_step(does: str, place: str) -> None:
    """If it closes, the loop ends as at its epoch's end; or each gets other batches."""
    of, options = PLACES[place]
    for at in range(3000):
        began, found, others = list[int](), list[Any](), list[Any]()
        loader = DataLoader(of(8), 2, worker_init_fn=began.append, **options)
        iterator: Any = iter(loader)
        call = iterator.close if does == "close" else partial(others.extend, iterator)
        other, act = elsewhere(call)
        steps(iterator, found, acting := Interrupter(at, "call", act=act))
        if acting.left >= 0:
            assert at > 50
            return
        other.join()
        assert does == "close" or len(found + others) == 4, acting.where
        assert next(iterator, None) is None, acting.where
        assert len(set(began)) == len(began), acting.where


def test_another_thread_begins_while_an_epoch_is_numbered() -> None:
    """No two iterators have the same number."""
    loader = DataLoader(Numbers(4), sampler=ShuffledIndices(4))
    one, two = iter(loader), iter(loader)
    other, act = elsewhere(partial(next, two))
    steps(one, [], Interrupter(0, "call", of="EpochNumbers.next_order_epoch", act=act))
    other.join()
    assert [it.counters and it.counters.epoch for it in (one, two)] == [0, 1]


@pytest.mark.slow
def test_a_signal_handler_saves_a_state_anywhere_in_a_step() -> None:
    """It is the state before a batch, or after it."""
    for at in range(3000):
        states, found, (of, options) = list[Any](), list[Any](), PLACES["stateful"]
        one = DataLoader(of(8), 2, **options)

        act = lambda: states.append((len(found), one.state_dict()))  # noqa: B023, E731
        steps(iter(one), found, Interrupter(at, "call", "c_return", act=act))
        if not states:
            assert at > 50
            return
        number, state = states[0]
        rest = resumed(partial(DataLoader[Any], of(8), 2, **options), state)
        expected = [found[number:], found[number + 1 :], *([found] * (number > 2))]
        assert rest in expected


@pytest.mark.parametrize("of", ["Feed._account", "ProcessPool._collect_results"])
def test_an_interrupt_beside_processes(of: str) -> None:
    """The result in hand is lost, so the iteration ends, and not as an epoch does."""
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
def test_an_interrupt_of_a_start(of: str) -> None:
    """The next step starts again; nothing is left of the first one."""
    iterator = iter(DataLoader(Numbers(4), 2, num_workers=1, workers="thread"))
    with pytest.raises(KeyboardInterrupt):
        steps(iterator, [], Interrupter(0, "call", of=of))
    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3]]


@pytest.mark.slow
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [SyncMap, AsyncMap, SyncStream, AsyncStream])
async def test_nothing_is_in_flight_at_the_end(kind: Any, way: str, by: str) -> None:
    """Of an epoch, and after a close or a cancellation amid one."""
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
