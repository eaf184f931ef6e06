"""``lifespan=`` is entered once, where samples are read; awaitables of plain code."""

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest

from aioloader import DataLoader
from beside import beside
from core.kit import PATIENCE
from lifespans import (
    NOTE,
    ONCE,
    PLACES,
    AsyncLog,
    SyncLog,
    join,
    on_loop,
    pass_on,
    plain,
    refusing,
)
from samples import AsyncMap, SyncMap, collect

Loader: Any = DataLoader  # options are tables here


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
async def test_a_lifespan_is_entered_once_in_each_place(name: str) -> None:
    """Once per epoch, for concurrent iterations, and inside ``async with``."""
    make, lifespan, options, place, events = PLACES[name]
    dataset = make()
    loader = Loader(dataset, batch_size=2, lifespan=lifespan, **options)
    assert len(await collect(loader)) == 4
    assert dataset.taken() == (events, {place})
    await asyncio.gather(*(collect(loader) for _ in range(3)))
    log, _ = dataset.taken()
    assert [log[0], log[-1]] == ["enter", "leave"]
    assert log.count("enter") == log.count("leave") == 1
    async with loader:
        await collect(loader)
        await collect(loader)
        log, _ = dataset.taken()
        assert log[0] == "enter"
        assert log.count("enter") == 1
        assert "leave" not in log
    assert dataset.taken() == (["leave"], {place})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["break", "cancellation", "error"])
@pytest.mark.parametrize("name", PLACES)
async def test_a_lifespan_is_left_however_the_loop_ends(name: str, how: str) -> None:
    """The consumer breaks or is cancelled, or a later stage fails."""

    def refuse(_samples: Any) -> Any:
        raise KeyError("collate")

    make, lifespan, options, place, events = PLACES[name]
    dataset = make(40)
    if how == "error":
        options = {**options, "collate_fn": refuse}
        if name == "iterable, loop":
            options["transform"] = pass_on
    loader = Loader(dataset, batch_size=2, lifespan=lifespan, **options)

    async def consume() -> None:
        async with loader:
            async for _ in loader:
                if how == "break":
                    break
                task.cancel()

    task = asyncio.ensure_future(consume())
    await asyncio.wait([task])
    assert task.cancelled() == (how == "cancellation")
    if how == "error":
        with pytest.raises(KeyError, match="collate"):
            await task
    assert dataset.taken() == (events, {place})


def test_a_plain_loop_enters_its_lifespan_itself() -> None:
    """In the consumer's thread; no thread and no loop is started."""
    dataset = SyncLog()
    loader = DataLoader(dataset, batch_size=2, lifespan=plain)
    threads = set(threading.enumerate())  # fsspec's thread never ends
    for _ in loader:
        assert set(threading.enumerate()) <= threads
    assert dataset.taken() == (ONCE, {"MainThread"})
    for _ in loader:
        break
    gc.collect()
    assert dataset.taken() == (ONCE, {"MainThread"})
    with loader:
        list(loader)
        list(loader)
        assert dataset.taken()[0] == ["enter", "read"]
    assert dataset.taken() == (["leave"], {"MainThread"})
    list(DataLoader(dataset, batch_size=2, lifespan=plain, timeout=60))
    assert dataset.taken() == (ONCE, {"aioloader-cpu"})
    with contextlib.suppress(ZeroDivisionError):
        for _ in loader:
            raise ZeroDivisionError
    gc.collect()
    assert dataset.taken() == (ONCE, {"MainThread"})


@pytest.mark.parametrize("name", ["thread", "loop", "threads"])
async def test_a_dropped_iterator_leaves_its_lifespan(name: str) -> None:
    make, lifespan, options, place, events = PLACES[name]
    left = threading.Event()

    class Watched(make):  # type: ignore[misc, valid-type]
        def note(self, event: str) -> None:
            super().note(event)
            if event == "leave":
                left.set()

    dataset = Watched(40)
    iterator = aiter(Loader(dataset, batch_size=2, lifespan=lifespan, **options))
    await anext(iterator)
    del iterator
    gc.collect()
    await beside(lambda: left.wait(10))
    assert dataset.taken() == (events, {place})
    join()


# -- errors -----------------------------------------------------------------------


def refused(name: str, step: str) -> tuple[Any, Any]:
    """Return a dataset and a loader whose lifespan raises on entering or leaving."""
    make, made, options, _, _ = PLACES[name]
    dataset = make()
    lifespan = refusing(step, is_async=made is on_loop)
    return dataset, Loader(dataset, batch_size=2, lifespan=lifespan, **options)


@pytest.mark.parametrize("name", PLACES)
async def test_an_error_on_entering_is_raised_each_time(name: str) -> None:
    """It has a note, and nothing is read; the next iteration enters again.

    Inside ``async with`` the loader can be closed all the same.
    """
    dataset, loader = refused(name, "entering")
    for attempt in (1, 2):
        with pytest.raises(ConnectionRefusedError, match=str(attempt)) as caught:
            await collect(loader)
        assert caught.value.__notes__ == [NOTE.format("entering")]
    with pytest.raises(ConnectionRefusedError, match="3"):
        async with loader:
            await collect(loader)
    assert dataset.taken()[0] == ["enter"] * 3


async def test_a_loader_may_close_while_its_loop_ends() -> None:
    """After an error on entering, the loop has stopped and is not yet closed."""
    closing = threading.Event()

    @contextlib.asynccontextmanager
    async def lifespan(_dataset: Any) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        close = loop.close

        def close_late() -> None:
            closing.wait(PATIENCE)
            close()

        setattr(loop, "close", close_late)  # noqa: B010  (its class has a method)
        raise ConnectionRefusedError
        yield

    with pytest.raises(ConnectionRefusedError):
        async with DataLoader(AsyncMap(8), 2, lifespan=lifespan) as loader:
            asyncio.get_running_loop().call_later(0.3, closing.set)
            await collect(loader)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
async def test_an_error_on_leaving_is_raised_at_the_end(name: str) -> None:
    """All batches are delivered before the error."""
    _, loader = refused(name, "leaving")
    with pytest.raises(ConnectionRefusedError) as caught:
        await collect(loader)
    assert caught.value.__notes__ == [NOTE.format("leaving")]
    assert loader.stats().batches == 4


def test_a_plain_loop_raises_errors_of_its_lifespan() -> None:
    """Errors on entering and on leaving, with a note."""
    for step in ("entering", "leaving"):
        loader = DataLoader(SyncLog(), lifespan=refusing(step, is_async=False))
        with pytest.raises(ConnectionRefusedError) as caught:
            list(loader)
        assert caught.value.__notes__ == [NOTE.format(step)]
        with pytest.raises(ConnectionRefusedError):
            list(loader)


@pytest.mark.parametrize("step", ["entering", "leaving"])
@pytest.mark.parametrize("name", ["loop", "thread, loop", "thread"])
async def test_errors_of_a_lifespan_keep_no_iterator(name: str, step: str) -> None:
    """The frames of the traceback do not keep it, either."""
    _, loader = refused(name, step)
    iterator = aiter(loader)
    left = weakref.ref(iterator)
    with contextlib.suppress(ConnectionRefusedError):
        while True:
            await anext(iterator)
    del iterator, loader
    join()  # the thread that raised the error still refers to it
    gc.collect()
    assert left() is None


# -- wrong lifespans ----------------------------------------------------------------


class OnlyAsync:
    """An async context manager that is a class."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    async def __aenter__(self) -> None:
        self.dataset.note("enter")

    async def __aexit__(self, *_exc: object) -> None:
        self.dataset.note("leave")


def bare(dataset: Any) -> Iterator[None]:
    yield


async def bare_async(dataset: Any) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize(
    ("make", "lifespan", "error", "words"),
    [
        (SyncMap, "open", TypeError, "must be a function that returns a con.*'str'"),
        (SyncMap, plain(None), TypeError, "_GeneratorContextManager"),
        (SyncMap, bare, TypeError, "decorated with contextlib.contextmanager"),
        (AsyncMap, bare_async, TypeError, "contextlib.asynccontextmanager"),
        (AsyncMap, pass_on, TypeError, "contextlib.asynccontextmanager"),
        (SyncMap, on_loop, ValueError, "no event loop runs for them: return a plain"),
        (SyncMap, OnlyAsync, ValueError, "no event loop runs for them"),
    ],
)
def test_bad_lifespans_raise(make: Any, lifespan: Any, error: Any, words: str) -> None:
    """At once; the message says what to return, or which decorator is missing."""
    with pytest.raises(error, match=words):
        DataLoader(make(), lifespan=lifespan)


def test_wrong_context_managers_raise_on_entering() -> None:
    """The constructor cannot know what the function will return."""
    for lifespan, message in (
        (partial(OnlyAsync), "async context manager 'OnlyAsync'"),
        (lambda _: None, "must return a context manager, .*'NoneType'"),
        (lambda _: pass_on(1), "must return a context manager, .*'coroutine'"),
    ):
        loader = Loader(SyncMap(), lifespan=lifespan)
        with pytest.raises(TypeError, match=message) as caught:
            list(loader)
        assert caught.value.__notes__ == [NOTE.format("entering")]


async def test_with_an_executor_only_the_loader_has_a_lifespan() -> None:
    """The user owns an executor's workers, so the loader must read."""
    with ThreadPoolExecutor(1) as executor:
        options = {"num_workers": 1, "workers": executor}
        with pytest.raises(ValueError, match="executor an initializer"):
            Loader(SyncLog(), lifespan=plain, **options)
        for dataset, lifespan, more in (
            (SyncLog(), plain, {"fetch": "loader"}),
            (AsyncLog(), on_loop, {}),
        ):
            loader = Loader(dataset, 2, lifespan=lifespan, **options, **more)
            await collect(loader)
            assert dataset.taken()[0] == ONCE


def test_closing_cancels_a_slow_entry() -> None:
    """The consumer does not wait for the lifespan."""
    began = threading.Event()

    @contextlib.asynccontextmanager
    async def lifespan(dataset: Any) -> AsyncIterator[None]:
        dataset.note("enter")
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            dataset.note("gave up")
            raise
        yield

    async def main(dataset: Any) -> None:
        iterator = aiter(DataLoader(dataset, lifespan=lifespan))
        step = asyncio.ensure_future(anext(iterator))
        await asyncio.to_thread(began.wait)
        step.cancel()
        await iterator.aclose()

    dataset = AsyncLog()
    asyncio.run(main(dataset))
    assert dataset.taken()[0] == ["enter", "gave up"]


# -- awaitables that plain code returns ------------------------------------------------

EXPECTED = [[0, 1, 2, 3], [4, 5, 6, 7]]
WAYS: dict[str, Any] = {
    "for": {},
    "async for": {},
    "transform": {"transform": abs},
    "threads": {"num_workers": 2, "workers": "thread"},
    "processes": {"num_workers": 2},
}


class Client:
    """A client that works on one loop only, where it was made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def get(self, index: int) -> int:
        """Return the index; fail on another loop."""
        assert asyncio.get_running_loop() is self._loop
        return index


class OfClient(SyncMap):
    """Plain reads by a client that the lifespan opens."""

    client: Any = None

    def __getitem__(self, index: int) -> Any:
        return self.client.get(index)


@contextlib.asynccontextmanager
async def opened(dataset: OfClient) -> AsyncIterator[None]:
    """Open the client on the loop of the lifespan."""
    dataset.client = Client()
    yield


@pytest.mark.parametrize("way", ["for", "async for", "threads", "processes"])
def test_clients_are_used_on_the_loop_of_the_lifespan(way: str) -> None:
    """Plain reads are awaited where async transforms run."""
    loader: Any = DataLoader(
        OfClient(8), 4, transform=pass_on, lifespan=opened, **WAYS[way]
    )
    batches = asyncio.run(collect(loader)) if way == "async for" else list(loader)
    assert [batch.tolist() for batch in batches] == EXPECTED


@pytest.mark.parametrize("way", ["async for", "threads"])
async def test_clients_are_used_on_the_callers_loop(way: str) -> None:
    """With ``loop="caller"``, even though the dataset looks plain."""
    dataset = OfClient(8)
    dataset.client = Client()
    loader: Any = DataLoader(dataset, 4, loop="caller", **WAYS[way])
    assert [batch.tolist() async for batch in loader] == EXPECTED


class Request:
    """An awaitable that is no coroutine."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __await__(self) -> Generator[Any, None, int]:
        return pass_on(self._index).__await__()


class Wrapper(SyncMap):
    """Plain reads that return awaitables."""

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        super().__init__(8)
        self._wrap = wrap

    def __getitem__(self, index: int) -> Any:
        return self._wrap(index)


def first(batch: Any) -> Any:
    """Return the batch of awaited values."""
    batch = batch.get("x") if isinstance(batch, dict) else batch
    return batch[0] if isinstance(batch, list) else batch


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way != "transform"])
@pytest.mark.parametrize(
    "wrap",
    [
        Request,
        lambda index: (pass_on(index), index),
        lambda index: {"x": pass_on(index), "y": index},
        lambda index: {"y": index, "x": [pass_on(index), (Request(index), index)]},
    ],
    ids=["object", "tuple", "dict", "nested"],
)
def test_awaitables_in_containers_are_awaited(wrap: Any, way: str) -> None:
    """Torch's wrappers of datasets return such containers."""
    loader: Any = DataLoader(Wrapper(wrap), 4, **WAYS[way])
    batches = asyncio.run(collect(loader)) if way == "async for" else list(loader)
    assert [first(batch).tolist() for batch in batches] == EXPECTED


class Hanging(SyncMap):
    """Its second batch never comes."""

    def __getitem__(self, index: int) -> Any:
        return pass_on(index) if index < 2 else self.hang()

    async def hang(self) -> None:
        """Wait forever."""
        await asyncio.get_running_loop().create_future()


def no_failure(_failure: Any) -> None:
    """Fail the test: no sample has failed."""
    raise AssertionError


@pytest.mark.parametrize("way", ["threads", "transform", "for"])
@pytest.mark.parametrize("loop", ["thread", "caller"])
async def test_closing_cancels_awaited_reads(way: str, loop: Any) -> None:
    arguments = {**WAYS[way], "loop": loop, "on_error": no_failure}
    loader: Any = DataLoader(Hanging(8), 2, **arguments)
    iterator = aiter(loader)
    await anext(iterator)
    await loader.aclose()  # it would warn after waiting for ten seconds


def test_the_error_of_an_awaitable_names_its_sample() -> None:
    """Even if all samples of the batch are awaited together."""

    async def fail(index: int) -> int:
        if index == 3:
            raise ValueError(index)
        return index

    for way in ("for", "transform", "threads"):
        loader: Any = DataLoader(Wrapper(fail), 4, **WAYS[way])
        with pytest.raises(ValueError, match="3") as caught:
            next(iter(loader))
        assert "sample index 3" in caught.value.__notes__[0]


async def test_a_lifespan_is_left_in_the_context_of_its_entry() -> None:
    """A token of a context variable is valid in one context only."""
    variable = ContextVar("variable", default=0)
    left: list[int] = []

    @contextlib.contextmanager
    def lifespan(_dataset: object) -> Iterator[None]:
        token = variable.set(1)
        yield
        left.append(variable.get())
        variable.reset(token)

    async def same(sample: int) -> int:
        return sample

    loader = Loader(SyncMap(4), transform=same, lifespan=lifespan)
    assert len([batch async for batch in loader]) == 4
    assert left == [1]
