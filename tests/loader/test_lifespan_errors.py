"""``lifespan=``: errors on entering and leaving, and what is refused."""

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from aioloader import DataLoader
from beside import beside
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


# -- errors -----------------------------------------------------------------------


@pytest.mark.parametrize("name", PLACES)
async def test_an_error_on_entering(name: str) -> None:
    """The iteration's error, once and noted; nothing is read; the next one tries."""
    make, made, options, _, _ = PLACES[name]
    dataset = make()
    lifespan = refusing("entering", is_async=made is on_loop)
    loader = Loader(dataset, batch_size=2, lifespan=lifespan, **options)
    for attempt in (1, 2):
        with pytest.raises(ConnectionRefusedError, match=str(attempt)) as caught:
            await collect(loader)
        assert caught.value.__notes__ == [NOTE.format("entering")]
    assert dataset.taken()[0] == ["enter"] * 2


@pytest.mark.parametrize("name", PLACES)
async def test_an_error_inside_of_with(name: str) -> None:
    """The loader can be closed all the same, and no one waits in vain."""
    make, made, options, _, _ = PLACES[name]
    dataset = make()
    lifespan = refusing("entering", is_async=made is on_loop)
    loader = Loader(dataset, batch_size=2, lifespan=lifespan, **options)
    with pytest.raises(ConnectionRefusedError, match="1"):
        async with loader:
            await collect(loader)
    assert dataset.taken()[0] == ["enter"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
async def test_an_error_on_leaving(name: str) -> None:
    """Raised at the end of the loop, after all batches."""
    make, made, options, _, _ = PLACES[name]
    dataset = make()
    lifespan = refusing("leaving", is_async=made is on_loop)
    loader = Loader(dataset, batch_size=2, lifespan=lifespan, **options)
    with pytest.raises(ConnectionRefusedError) as caught:
        await collect(loader)
    assert caught.value.__notes__ == [NOTE.format("leaving")]
    assert loader.stats().batches == 4


def test_errors_inline() -> None:
    """The same in a plain loop."""
    for what in ("entering", "leaving"):
        loader = DataLoader(SyncLog(), lifespan=refusing(what, is_async=False))
        with pytest.raises(ConnectionRefusedError) as caught:
            list(loader)
        assert caught.value.__notes__ == [NOTE.format(what)]
        with pytest.raises(ConnectionRefusedError):
            list(loader)


@pytest.mark.parametrize("what", ["entering", "leaving"])
@pytest.mark.parametrize("name", ["loop", "beside a loop", "thread"])
async def test_errors_keep_no_iterator(name: str, what: str) -> None:
    """Though errors have frames."""
    make, made, options, _, _ = PLACES[name]
    lifespan = refusing(what, is_async=made is on_loop)
    loader = Loader(make(), lifespan=lifespan, **options)
    iterator = aiter(loader)
    left = weakref.ref(iterator)
    with contextlib.suppress(ConnectionRefusedError):
        while True:
            await anext(iterator)
    del iterator, loader
    join()  # the thread that met the error has it still
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("is_hosted", [False, True])
async def test_a_stop_of_the_users_is_no_end(is_hosted: bool) -> None:
    """It would end a ``for`` quietly, and a future refuses it."""

    class Empty:
        def __init__(self, _dataset: Any) -> None:
            pass

        def __enter__(self) -> None:
            raise StopIteration

        def __exit__(self, *_exc: object) -> None:
            pass

    options: Any = {"transform": pass_on} if is_hosted else {}
    loader = DataLoader(SyncMap(4), lifespan=Empty, **options)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await beside(lambda: list(loader))


# -- what is refused ----------------------------------------------------------------


class OnlyAsync:
    """An async context manager that is a class."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    async def __aenter__(self) -> None:
        self.dataset.note("enter")

    async def __aexit__(self, *_exc: object) -> None:
        self.dataset.note("leave")


def bare(dataset: Any) -> Iterator[None]:
    """Forget the decorator."""
    yield


async def bare_async(dataset: Any) -> AsyncIterator[None]:
    """Forget it too."""
    yield


@pytest.mark.parametrize(
    ("make", "lifespan", "error", "what"),
    [
        (
            SyncMap,
            "open",
            TypeError,
            "must be a function that returns a context .*'str'",
        ),
        (SyncMap, plain(None), TypeError, "_GeneratorContextManager"),
        (SyncMap, bare, TypeError, "decorated with contextlib.contextmanager"),
        (AsyncMap, bare_async, TypeError, "contextlib.asynccontextmanager"),
        (AsyncMap, pass_on, TypeError, "contextlib.asynccontextmanager"),
        (SyncMap, on_loop, ValueError, "no event loop runs for them: return a plain"),
        (SyncMap, OnlyAsync, ValueError, "no event loop runs for them"),
    ],
)
def test_arguments(make: Any, lifespan: Any, error: Any, what: str) -> None:
    """They are checked at once."""
    with pytest.raises(error, match=what):
        DataLoader(make(), lifespan=lifespan)


def test_what_is_known_when_it_is_called() -> None:
    """What no one could tell before."""
    for lifespan, what in (
        (partial(OnlyAsync), "async context manager 'OnlyAsync'"),
        (lambda _: None, "must return a context manager, .*'NoneType'"),
        (lambda _: pass_on(1), "must return a context manager, .*'coroutine'"),
    ):
        loader = Loader(SyncMap(), lifespan=lifespan)
        with pytest.raises(TypeError, match=what) as caught:
            list(loader)
        assert caught.value.__notes__ == [NOTE.format("entering")]


async def test_executors() -> None:
    """Their workers are the user's; the loader may read for them."""
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


def test_a_slow_entry_is_given_up() -> None:
    """A consumer that leaves meanwhile does not wait for it."""
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
