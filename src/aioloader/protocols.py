"""The interfaces of datasets, and how they are recognised.

A user's dataset is recognised by its public methods: it is *map-style*
(``__getitem__``), *iterable* (``__iter__``) or an *async iterable* (``__aiter__``). A
coroutine function is *async*: it runs on an event loop, many at a time. A plain
function is *sync*: it runs off the loop. Features of aioloader's own datasets are
recognised by base class (``HasLifespan``, ``OwnStream``, ``BlockIterator``): a user's
object may have methods of the same names that mean something else.
"""

import abc
import enum
import functools
import inspect
import itertools
import types
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

import torch
from torch.utils.data import ChainDataset, IterableDataset, Subset

_FUNCTIONS = types.FunctionType, types.MethodType

Sample_co = TypeVar("Sample_co", covariant=True)


@runtime_checkable
class MapDataset(Protocol[Sample_co]):
    """Samples by index; ``__getitem__`` may be a coroutine function."""

    def __getitem__(self, index: Any, /) -> Sample_co | Awaitable[Sample_co]:
        """Return the sample, or an awaitable of it."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...


class HasLifespan(abc.ABC):
    """A dataset or iterator of aioloader with resources that belong to an event loop.

    Only aioloader's own classes derive from it: for a user's object the loader enters
    only the result of the argument ``lifespan``.
    """

    @abc.abstractmethod
    def lifespan(self) -> AbstractAsyncContextManager[Any]:
        """Return the context manager that each loop that reads it enters and leaves."""


class BlockIterator(HasLifespan):
    """One iteration over an aioloader stream, which is read a block at a time.

    Attributes:
        fills: Whether a batch may be filled by several blocks. If not, one block is one
            batch: the samples at its positions, some of which may be empty.
        at: How many positions of an epoch this rank had passed where it starts.
        real: How many samples of an epoch are not padding; None: all.
        leaves_out: Whether a failed sample has no position: the next one takes it.
    """

    fills: bool
    leaves_out: bool
    at: int
    real: int | None

    @abc.abstractmethod
    async def pull(self, limit: int) -> Any:
        """Return the samples at the next ``limit`` positions, as a ``Block``.

        If the iterator ``fills``, there are 1 to ``limit`` samples, and an empty block
        is the end. A sample that failed is a ``Bad`` in a list.

        Raises:
            StopAsyncIteration: At the end, if it does not fill.
        """

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last block, for ``load_state_dict``."""


class OwnStream(abc.ABC):
    """A stream of aioloader, which knows about epochs and ranks.

    Attributes:
        ranks: The rank that reads it and their number; None: every rank reads all.
    """

    ranks: tuple[int, int] | None

    @abc.abstractmethod
    def begin_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that starts, unless the user has chosen one."""

    @abc.abstractmethod
    def for_epoch(self) -> "OwnStream":
        """Return a copy to read, also in workers; it takes over a loaded state."""

    @abc.abstractmethod
    def shard(self, rank: int, world_size: int) -> "OwnStream":
        """Return the part of one rank."""

    @abc.abstractmethod
    def total(self) -> int | None:
        """Return how many samples an epoch of all ranks has, if known."""

    @abc.abstractmethod
    def evened(self, tail: Any, *, is_skipped: bool = False) -> "OwnStream":
        """Return the stream whose ranks have equal parts of a known total.

        Args:
            tail: What happens to a remainder that cannot be split evenly.
            is_skipped: Whether failed samples are left out.
        """

    @abc.abstractmethod
    def fitted(self, state: dict[str, Any], *, strict: bool = True) -> dict[str, Any]:
        """Return a state converted for this stream.

        Args:
            state: The state of an iterator.
            strict: Whether a state of another stream is an error; if not, a warning
                says which parts are ignored.

        Raises:
            StateMismatchError: If it does not fit.
        """

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration where ``state`` was taken from an iterator."""

    @abc.abstractmethod
    def __aiter__(self) -> BlockIterator:
        """Return an iteration."""


class Kind(enum.Enum):
    """How samples are read from a dataset."""

    MAP = "map"
    ITERABLE = "iterable"
    ASYNC_ITERABLE = "async iterable"


def kind_of(dataset: object) -> Kind:
    """Return the kind of ``dataset``.

    ``__aiter__`` wins over ``__getitem__``, which wins over ``__iter__``, so that a
    list is map-style; torch's ``IterableDataset`` is iterable whatever it inherits.

    Raises:
        TypeError: If ``dataset`` has none of the three methods.
    """
    cls = type(dataset)  # where Python looks for them: an object may answer any name
    if has_aiter(dataset) or _chains_async(dataset):
        return Kind.ASYNC_ITERABLE
    if isinstance(dataset, IterableDataset):
        return Kind.ITERABLE
    if hasattr(cls, "__getitem__"):
        return Kind.MAP
    if hasattr(cls, "__iter__"):
        return Kind.ITERABLE
    raise TypeError(
        f"dataset must have __getitem__, __iter__ or __aiter__, got {cls.__name__!r}"
    )


def has_aiter(value: object) -> bool:
    """Tell whether the class of ``value`` defines ``__aiter__``."""
    return _defines(type(value), "__aiter__")


def _defines(cls: type, method: str) -> bool:
    """Tell whether a class defines a method; None says in Python that it does not.

    Unlike ``hasattr``, it has no effects: a ``MagicMock`` makes its methods when they
    are looked up, and each is another mock.
    """
    found = next(
        (vars(one)[method] for one in cls.__mro__ if method in vars(one)), None
    )
    return callable(found)


def is_async_function(function: object) -> bool:
    """Tell whether calling ``function`` gives a coroutine."""
    while isinstance(function, functools.partial):
        function = function.func
    if function is None or isinstance(function, _FUNCTIONS):
        return inspect.iscoroutinefunction(function)
    call = getattr(type(function), "__call__", None)  # noqa: B004  (whether it is async, not whether it exists)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def reads_async(dataset: object) -> bool:
    """Tell whether reading samples of a map-style ``dataset`` may return awaitables.

    True if its own method is a coroutine function, or if it is a wrapper, such as
    ``Subset`` or ``ConcatDataset``, of such a dataset.
    """
    return _reads_async(dataset, set())


def _reads_async(dataset: object, seen: set[int]) -> bool:
    if id(dataset) in seen:
        return False
    seen.add(id(dataset))
    cls = type(dataset)
    methods = (getattr(cls, "__getitem__", None), getattr(cls, "__getitems__", None))
    return any(is_async_function(method) for method in methods) or any(
        _reads_async(inner, seen) for inner in _held_datasets(dataset)
    )


def _held_datasets(dataset: object) -> list[object]:
    """Return the datasets that a wrapper holds in attributes and their items."""
    held: list[object] = []
    for value in getattr(dataset, "__dict__", {}).values():
        if type(value) is dict:
            held += itertools.islice(value.values(), 1024)
        elif type(value) in {list, tuple}:
            held += value[:1024]
        else:
            held.append(value)
    return [value for value in held if _is_dataset(value)]


def _is_dataset(value: object) -> bool:
    """Tell whether ``value`` is map-style and no builtin, array or tensor."""
    cls = type(value)
    return (
        _defines(cls, "__getitem__")
        and _defines(cls, "__len__")
        and hasattr(value, "__dict__")
        and not isinstance(value, torch.Tensor)
    )


def _chains_async(dataset: object) -> bool:
    """Tell whether a ``ChainDataset`` holds an async iterable."""
    return (
        isinstance(dataset, ChainDataset)
        and isinstance(dataset.datasets, (list, tuple))
        and any(kind_of(inner) is Kind.ASYNC_ITERABLE for inner in dataset.datasets)
    )


def batch_getter(dataset: object) -> Callable[[Any], Any] | None:
    """Return ``dataset.__getitems__`` if it can replace ``__getitem__``.

    A subclass that overrides only ``__getitem__`` would get its parent's rows from an
    inherited ``__getitems__`` (pytorch/pytorch#163184), so it counts only if it is
    defined on the class of ``__getitem__`` or a subclass. Torch's ``Subset`` delegates
    to the inner dataset, which decides there. Other plain wrappers of async datasets
    (``StackDataset``) look into the samples, so theirs is not used.
    """
    if type(dataset) is Subset and batch_getter(dataset.dataset) is None:
        return None
    mro = type(dataset).__mro__
    item, items = (
        next((level for level, cls in enumerate(mro) if name in vars(cls)), len(mro))
        for name in ("__getitem__", "__getitems__")
    )
    getter: Callable[[Any], Any] | None = getattr(dataset, "__getitems__", None)
    if items == len(mro) or items > item or not callable(getter):
        return None
    passes_on = type(dataset) is Subset or is_async_function(getter)
    return getter if passes_on or not reads_async(dataset) else None


def is_stateful(part: object) -> bool:
    """Tell whether ``part`` follows torchdata's state protocol.

    Its ``state_dict`` needs no argument, as far as is known. With one that is called
    ``destination``, as those of modules and tensordicts, it returns all the data.
    """
    save, load = (getattr(part, f"{name}state_dict", None) for name in ("", "load_"))
    if not (callable(save) and callable(load)):
        return False
    try:
        signature = inspect.signature(save)
        signature.bind()
    except ValueError:  # not written in Python
        return True
    except TypeError:
        return False
    return "destination" not in signature.parameters


def is_own_stream(dataset: object) -> TypeGuard[OwnStream]:
    """Tell whether ``dataset`` is one of aioloader's streams."""
    return isinstance(dataset, OwnStream)
