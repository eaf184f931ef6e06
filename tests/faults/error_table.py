"""The cells of the table of errors: the places of user code, and the ways to run it.

There are eight samples in batches of two; each place raises when it meets sample 3.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self

from aioloader import DataLoader, Device, Retry
from aioloader.datasets import from_iterable

N = 8
BATCHES = [[0, 1], [2, 3], [4, 5], [6, 7]]
PATIENCE = 30.0


class OwnError(BaseException):
    """A BaseException of the user's, as test frameworks and async libraries have."""


class LockedError(Exception):
    """An exception whose attributes cannot be pickled."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lock = threading.Lock()


KINDS: dict[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (
        ValueError,
        LockedError,
        StopIteration,
        StopAsyncIteration,
        GeneratorExit,
        asyncio.CancelledError,
        OwnError,
        KeyboardInterrupt,
        SystemExit,
    )
}


@dataclass(frozen=True)
class Raiser:
    """The user's code: functions that raise one kind of exception for sample 3."""

    kind: type[BaseException]

    def __call__(self, sample: Any) -> Any:
        """Return ``sample``, unless it is 3 or a batch with it."""
        if sample == 3 or (type(sample) is list and 3 in sample):
            raise self.kind("the user's")
        return sample

    async def later(self, sample: Any) -> Any:
        """Do the same as a coroutine."""
        await asyncio.sleep(0)
        return self(sample)

    def instead(self, failure: Any) -> Any:
        return self(failure.index)

    def begin(self, *_args: Any) -> None:
        self(3)

    def left(self, _dataset: Any) -> "Lifespan":
        """Return a lifespan that raises on exit."""
        return Lifespan(same, self)

    def entered(self, _dataset: Any) -> "Lifespan":
        """Return a lifespan that raises on entry."""
        return Lifespan(self, same)


@dataclass
class Lifespan:
    """A context manager, plain and async."""

    enter: Callable[[Any], Any]
    leave: Callable[[Any], Any]

    def __enter__(self) -> None:
        self.enter(3)

    def __exit__(self, *_exc: object) -> None:
        self.leave(3)

    async def __aenter__(self) -> None:
        await asyncio.sleep(0)
        self.enter(3)

    async def __aexit__(self, *_exc: object) -> None:
        await asyncio.sleep(0)
        self.leave(3)


def same(sample: Any) -> Any:
    """Return a sample or a batch as it is."""
    return sample


@dataclass
class Samples:
    """A plain map-style dataset.

    Attributes:
        check: Called with each sample; returns or raises.
    """

    check: Callable[[Any], Any] = same

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.check(index)


class AsyncSamples(Samples):
    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0)
        return self.check(index)


class Whole(Samples):
    """A dataset that is read by batches."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [self.check(index) for index in indices]


class AsyncWhole(AsyncSamples):
    async def __getitems__(self, indices: list[int]) -> Any:
        await asyncio.sleep(0)
        return [self.check(index) for index in indices]


class Wrapped(AsyncSamples):
    """A plain method that returns a coroutine."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


@dataclass
class Steps:
    """An iterable that can continue after an error, plain and async by its class."""

    check: Callable[[Any], Any]
    position: int = -1

    def step(self, stop: type[Exception]) -> Any:
        """Return the next sample, or raise ``stop`` at the end."""
        self.position += 1
        if self.position == N:
            raise stop
        return self.check(self.position)


class PlainSteps(Steps):
    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self.step(StopIteration)


class AsyncSteps(Steps):
    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        await asyncio.sleep(0)
        return self.step(StopAsyncIteration)


@dataclass
class Generated:
    """A generator, which an error ends."""

    check: Callable[[Any], Any]

    def __iter__(self) -> Iterator[Any]:
        for index in range(N):
            yield self.check(index)


@dataclass
class AsyncGenerated:
    check: Callable[[Any], Any]

    async def __aiter__(self) -> AsyncIterator[Any]:
        for index in range(N):
            await asyncio.sleep(0)
            yield self.check(index)


@dataclass
class Sampler:
    """A sampler whose iterator raises; its StopIteration at the end is legal."""

    raiser: Raiser
    step: int = 1

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[Any]:
        return _Drawn(self.raiser, self.step)


@dataclass
class _Drawn:
    raiser: Raiser
    step: int
    position: int = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self.position >= N:
            raise StopIteration
        place, self.position = self.position, self.position + self.step
        if place + self.step > 3 >= place:
            self.raiser(3)
        return place if self.step == 1 else [place, place + 1]


@dataclass
class Unopened:
    """A sampler, or an iterable, that cannot be iterated."""

    raiser: Raiser

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Any:
        return self.raiser(3)


class AsyncUnopened(Unopened):
    __iter__ = None  # type: ignore[assignment]

    def __aiter__(self) -> Any:
        return self.raiser(3)


class Asks(Retry):
    """A retry whose predicate raises."""

    kind: type[BaseException] = ValueError

    def is_worth(self, error: BaseException) -> bool:
        """Raise."""
        Raiser(self.kind)(3)
        return super().is_worth(error)


def failing(sample: Any) -> Any:
    """Raise an OSError, which a policy handles, for sample 3."""
    return Raiser(OSError)(sample)


def predicate(kind: type[BaseException]) -> Retry:
    """Return a retry whose predicate raises ``kind``."""
    made: Retry = type("Asks", (Asks,), {"kind": kind})()
    return made


@dataclass(frozen=True)
class Mode:
    """A way to run a loader.

    Attributes:
        is_async: Whether the dataset and the functions are coroutines.
        awaits: Whether the consumer is ``async for``.
        options: The loader's options.
        in_processes: Whether user code runs in worker processes.
        executor: The class of executor for its workers.
        patience: The loader's ``timeout``, with which no ``for`` is inline.
    """

    is_async: bool = False
    awaits: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    in_processes: bool = False
    executor: Any = None
    patience: float = PATIENCE

    def fits(self, place: str) -> bool:
        """Return whether this mode has such a place."""
        options = dict(self.options)
        if place in {"worker_init_fn", "lifespan", "lifespan exit"} and self.executor:
            return False
        if place == "worker_init_fn":
            return "num_workers" in options
        if place == ("__next__" if self.is_async else "__anext__"):
            return False
        if place in {"__iter__", "__next__", "generator"} and not self.is_async:
            # Only worker processes have copies of an iterable.
            return self.executor is None and options.get("workers") != "thread"
        return True


def mode(**chosen: Any) -> Mode:
    """Return a mode; other names are the loader's options."""
    names = {"is_async", "awaits", "in_processes", "executor", "patience"}
    own = {name: chosen.pop(name) for name in names & set(chosen)}
    return replace(Mode(), options=tuple(chosen.items()), **own)


MODES: dict[str, Mode] = {
    "inline": mode(patience=0.0),
    "ahead": mode(prefetch_factor=2),
    "for, on the private loop": mode(is_async=True),
    "async for, plain": mode(awaits=True),
    "async for": mode(is_async=True, awaits=True),
    "loop='caller'": mode(is_async=True, awaits=True, loop="caller"),
    "threads": mode(num_workers=1, workers="thread"),
    "threads, async": mode(is_async=True, num_workers=1, workers="thread"),
    "executor": mode(num_workers=1, executor=ThreadPoolExecutor),
    "fork": mode(num_workers=1, in_processes=True),
    "fork, async": mode(
        is_async=True, num_workers=1, fetch="workers", in_processes=True
    ),
    "fork, async for": mode(awaits=True, num_workers=1, in_processes=True),
    "process executor": mode(num_workers=1, executor=ProcessPoolExecutor),
}


@dataclass(frozen=True)
class _Keeps:
    raiser: Raiser

    def __call__(self, sample: Any) -> bool:
        self.raiser(sample)
        return True

    async def later(self, sample: Any) -> bool:
        await asyncio.sleep(0)
        return self(sample)


def options_of(place: str, kind: type[BaseException], way: Mode) -> dict[str, Any]:
    """Return the loader's arguments for a cell."""
    raiser, is_async = Raiser(kind), way.is_async
    function = raiser.later if is_async else raiser
    failed = AsyncSamples if is_async else Samples
    keeps = _Keeps(raiser).later if is_async else _Keeps(raiser)
    numbers: Any = from_iterable(range(N))
    places: dict[str, Callable[[], dict[str, Any]]] = {
        "__getitem__": lambda: {"dataset": failed(raiser)},
        "__getitem__ of a wrapper": lambda: {"dataset": Wrapped(raiser)},
        "__getitems__": lambda: {
            "dataset": (AsyncWhole if is_async else Whole)(raiser)
        },
        "__iter__": lambda: {
            "dataset": (AsyncUnopened if is_async else Unopened)(raiser)
        },
        "__next__": lambda: {"dataset": PlainSteps(raiser)},
        "__anext__": lambda: {"dataset": AsyncSteps(raiser)},
        "generator": lambda: {
            "dataset": (AsyncGenerated if is_async else Generated)(raiser)
        },
        "sampler": lambda: {"sampler": Sampler(raiser)},
        "sampler's __iter__": lambda: {"sampler": Unopened(raiser)},
        "batch_sampler": lambda: {"batch_sampler": Sampler(raiser, step=2)},
        "transform": lambda: {"transform": function},
        "collate_fn": lambda: {"collate_fn": function},
        "on_error": lambda: {"dataset": failed(failing), "on_error": raiser.instead},
        "on_error of a transform": lambda: {
            "transform": Raiser(OSError).later if is_async else failing,
            "on_error": raiser.instead,
        },
        "retry": lambda: {"dataset": failed(failing), "retry": predicate(kind)},
        "worker_init_fn": lambda: {"worker_init_fn": raiser.begin},
        "lifespan": lambda: {"lifespan": raiser.entered},
        "lifespan exit": lambda: {"lifespan": raiser.left},
        "Device.transform": lambda: {"device": Device(transform=raiser)},
        "stream's map": lambda: {"dataset": numbers.map(function)},
        "stream's filter": lambda: {"dataset": numbers.filter(keeps)},
        "stream's source": lambda: {
            "dataset": from_iterable(lambda: PlainSteps(raiser)).map(same)
        },
    }
    chosen = {"dataset": failed(), "batch_size": 2, "collate_fn": same}
    chosen |= dict(way.options) | places[place]()
    if "batch_sampler" in chosen:
        del chosen["batch_size"]
    return chosen


# The row of the page for each place.
PLACES = {
    "__getitem__": "`__getitem__`",
    "__getitem__ of a wrapper": "`__getitem__`",
    "__getitems__": "`__getitems__`",
    "__iter__": "`__iter__`, `__aiter__` of an iterable",
    "__next__": "`__next__` of an iterable",
    "__anext__": "`__anext__` of an iterable",
    "generator": "a `generator`, plain or async",
    "sampler": "`__next__` of a sampler",
    "sampler's __iter__": "`__iter__` of a sampler",
    "batch_sampler": "`__next__` of a sampler",
    "transform": "`transform`",
    "collate_fn": "`collate_fn`",
    "on_error": "`on_error`",
    "on_error of a transform": "`on_error`",
    "retry": "`Retry.is_worth` of a subclass",
    "worker_init_fn": "`worker_init_fn`",
    "lifespan": "`lifespan`: entering",
    "lifespan exit": "`lifespan`: leaving",
    "Device.transform": "`Device.transform`",
    "stream's map": "`map`, `filter` of a stream",
    "stream's filter": "`map`, `filter` of a stream",
    "stream's source": "`__next__` of an iterable",
}


@contextlib.contextmanager
def loader_of(place: str, kind: str, way: Mode) -> Iterator[DataLoader[Any]]:
    """Open the loader of a cell."""
    options = options_of(place, KINDS[kind], way)
    with contextlib.ExitStack() as stack:
        if way.executor is not None:
            options["workers"] = stack.enter_context(way.executor(1))
        loader: Any = DataLoader(**options)
        loader.timeout = way.patience
        yield loader


def drained(loader: DataLoader[Any]) -> list[Any]:
    """Return batches, and errors as they are, by ``next``."""
    outcomes: list[Any] = []
    iterator: Any = None
    while len(outcomes) < 2 * N:
        try:
            iterator = iter(loader) if iterator is None else iterator
            batch = next(iterator)
        except BaseException as error:  # noqa: BLE001  (an outcome)
            if type(error) is StopIteration and not error.args:
                break
            outcomes.append(error)
            if iterator is None or isinstance(error, (KeyboardInterrupt, SystemExit)):
                break
        else:
            outcomes.append(batch)
    with contextlib.suppress(BaseException):  # there may be none
        iterator.close()
    return outcomes


async def drained_async(loader: DataLoader[Any]) -> list[Any]:
    """Return batches, and errors as they are, by ``anext``."""
    outcomes: list[Any] = []
    iterator: Any = None
    while len(outcomes) < 2 * N:
        try:
            iterator = aiter(loader) if iterator is None else iterator
            batch = await anext(iterator)
        except BaseException as error:  # noqa: BLE001  (an outcome)
            if type(error) is StopAsyncIteration and not error.args:
                break
            outcomes.append(error)
            if iterator is None or isinstance(error, (KeyboardInterrupt, SystemExit)):
                break
        else:
            outcomes.append(batch)
    with contextlib.suppress(BaseException):  # there may be none
        await iterator.aclose()
    return outcomes
