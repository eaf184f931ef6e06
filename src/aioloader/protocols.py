"""The interfaces of datasets, and how aioloader recognises them.

A user's dataset is recognised by its public methods: it is *map-style*
(``__getitem__``), *iterable* (``__iter__``) or an *async iterable* (``__aiter__``). A
coroutine function is *async*: many calls run at a time on an event loop. A plain
function is *sync*: it runs in other threads or processes. Features of aioloader's own
datasets are recognised by base class (``HasLifespan``, ``OwnStream``,
``BlockIterator``), because a user's methods of the same names may mean something else.
"""

import abc
import enum
import functools
import inspect
import types
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    IterableDataset,
    StackDataset,
    Subset,
)

_FUNCTIONS = types.FunctionType, types.MethodType


class HasLifespan(abc.ABC):
    """An aioloader dataset or iterator whose resources belong to an event loop.

    Only aioloader's own classes derive from it. For a user's dataset, the loader enters
    only the context manager that the argument ``lifespan`` returns.
    """

    @abc.abstractmethod
    def lifespan(self) -> AbstractAsyncContextManager[Any]:
        """Return the context manager that each event loop enters while it reads."""

    def fingerprint(self) -> dict[str, Any]:
        """Return the JSON-ready entries of a state that identify the samples."""
        return {}


class OneIteration:
    """Base class of iterators that cannot be copied or pickled, like torch's."""

    def __reduce__(self) -> NoReturn:
        raise NotImplementedError(
            f"a {type(self).__name__} cannot be copied or pickled: save its position "
            "with state_dict(), and load that into a copy of the loader or stream"
        )


class BlockIterator(OneIteration, HasLifespan):
    """One iteration over an aioloader stream, read one block at a time."""

    # Whether several blocks may fill one batch. If not, each block is one batch, and
    # some of its positions may have no sample.
    fills: bool
    leaves_out: bool  # failed samples take no position
    at: int  # number of the epoch's positions that this rank passed before
    real: int | None  # number of samples per epoch without padding; None: all
    refills: bool  # the epoch's first samples fill a short last batch

    @abc.abstractmethod
    def take(self, size: int, most: int) -> Iterable[tuple[Any, dict[str, Any]]]:
        """Yield up to ``most`` blocks of ``size`` samples that have already been read.

        None of the samples has failed. Each block comes with the position after it.
        """

    @abc.abstractmethod
    async def pull(self, limit: int, more: int = 0) -> Any:
        """Return the samples at the next ``limit`` positions, as a ``Block``.

        If samples come quickly, up to ``more`` further samples are read for ``take``.
        With ``fills``, a block has 1 to ``limit`` samples, and an empty block marks the
        end. A block that is a list may contain ``FailedSample`` objects.

        Raises:
            StopAsyncIteration: At the end, if ``fills`` is False.
        """

    @abc.abstractmethod
    def position(self) -> dict[str, Any]:
        """Return the position after the last block, for ``load_position``."""

    @abc.abstractmethod
    def again(self, state: dict[str, Any] | None) -> "BlockIterator":
        """Return a new iteration over the same samples, from the start or ``state``."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Stop pending work and wait for it to end."""


@dataclass(eq=False, repr=False)
class Outline:
    """The properties of a stream that a loader must know before an epoch."""

    ranks: tuple[int, int] | None  # rank and number of ranks; None: read all
    world_size: int  # number of ranks that share the stream
    readers: int | None  # number of readers, if ``readers()`` fixed it
    total: int | None  # samples per epoch on all ranks together, if known
    is_endless: bool  # an epoch never ends
    continues: bool  # an epoch starts where the previous one stopped
    chosen_epoch: int | None  # epoch number that the user set, if any
    # Sources without a state: resuming is exact only if they repeat their samples.
    reread: list[str]
    # Given ``tail`` and the start (an epoch, and how many of its batches), returns the
    # ``EpochEndRounds`` in which ranks agree on the end; None without a store.
    end_talk: Callable[[Any, tuple[int, int]], Any]


class OwnStream(abc.ABC):
    """An aioloader stream, which is an async iterable that knows epochs and ranks."""

    @abc.abstractmethod
    def outline(self, ranks: tuple[int, int] | None = None) -> Outline:
        """Return the current outline; ``ranks`` is a rank and the number of ranks."""

    @abc.abstractmethod
    def for_epoch(
        self,
        ranks: tuple[int, int] | None = None,
        tail: Any = "uneven",
        *,
        has_peers: bool = False,
        is_skipped: bool = False,
    ) -> "OwnStream":
        """Return a copy to iterate, in any process; the copy takes over a loaded state.

        Args:
            ranks: A rank, and the number of ranks; None: those set by ``shard``.
            tail: How to handle an uneven last global batch, as in ``DataLoader``.
            has_peers: Whether other processes read the same part.
            is_skipped: Whether failed samples are left out.
        """

    @abc.abstractmethod
    def following(
        self, state: dict[str, Any], epoch: int, workers: int = 1
    ) -> dict[str, Any]:
        """Return the first state of ``epoch``, after an epoch that ended at ``state``.

        Only for streams that continue across epochs. Each rank has ``workers`` workers.
        An epoch number that the user set takes precedence over ``epoch``.
        """

    @abc.abstractmethod
    def fitted(self, state: dict[str, Any], *, strict: bool = True) -> dict[str, Any]:
        """Return the state of an iterator, converted for this stream.

        ``strict``: require the same versions of shards, not only the same lengths.

        Raises:
            StateMismatchError: If the state does not fit this stream.
        """

    @abc.abstractmethod
    def load_position(self, state: dict[str, Any]) -> None:
        """Make the next iteration start at ``state``, an iterator's ``position``."""


class Kind(enum.Enum):
    """How samples are read from a dataset."""

    MAP = "map"
    ITERABLE = "iterable"
    ASYNC_ITERABLE = "async iterable"


def kind_of(dataset: object) -> Kind:
    """Return the kind of ``dataset``.

    ``__aiter__`` takes precedence, then ``__getitem__``, then ``__iter__``: a list is
    map-style. Torch's ``IterableDataset`` is never map-style.

    Raises:
        TypeError: If ``dataset`` has none of the three methods.
    """
    cls = type(dataset)  # Python looks up methods here; an object may answer any name
    if has_aiter(dataset) or (
        isinstance(dataset, ChainDataset)
        and isinstance(dataset.datasets, (list, tuple))
        and Kind.ASYNC_ITERABLE in map(kind_of, dataset.datasets)
    ):
        return Kind.ASYNC_ITERABLE
    if isinstance(dataset, IterableDataset):
        return Kind.ITERABLE
    if hasattr(cls, "__getitem__"):
        return Kind.MAP
    if hasattr(cls, "__iter__"):
        return Kind.ITERABLE
    if inspect.isgeneratorfunction(dataset) or inspect.isasyncgenfunction(dataset):
        raise TypeError(f"dataset is a generator function: {_ONCE}")
    hint = ": pass an instance" if isinstance(dataset, type) else ""
    hint = ": await it" if inspect.isawaitable(dataset) else hint
    raise TypeError(
        "dataset must have __getitem__, __iter__ or __aiter__, got "
        f"{cls.__name__!r}{hint}"
    )


_ONCE = (
    "each epoch needs a new generator; pass "
    "aioloader.datasets.from_async_iterable(function), or from_iterable(function) for "
    "a plain one, which call the function for each epoch"
)


def refuse_again(dataset: object, *, is_begun: bool, readers: int = 1) -> None:
    """Refuse to read a generator, or an iterator such as ``map``, more than once.

    Args:
        dataset: The dataset.
        is_begun: Whether an epoch has already begun to read it.
        readers: Number of workers, each of which would read a copy of the dataset.

    Raises:
        TypeError: If samples would be missing, or would be repeated by each worker.
    """
    is_once = isinstance(dataset, (Iterator, AsyncIterator))
    if not is_once or type(dataset).__module__ not in {"builtins", "itertools"}:
        return  # a user's own iterator may start again
    frame = getattr(dataset, "gi_frame", getattr(dataset, "ag_frame", dataset))
    name = type(dataset).__name__
    if is_begun or frame is None:
        raise TypeError(
            f"the dataset is an iterator ({name}) that was read before, and this epoch "
            f"would lack its samples: {_ONCE}"
        )
    if readers > 1:
        raise TypeError(
            f"the dataset is an iterator ({name}), and each of {readers} workers would "
            f"read a copy of it: {_ONCE}"
        )


def has_aiter(value: object) -> bool:
    """Tell whether the class of ``value`` defines ``__aiter__``.

    ``__aiter__ = None`` counts as not defined. Unlike ``hasattr``, this has no side
    effects: a ``MagicMock`` creates any method that is looked up.
    """
    spaces = (vars(cls) for cls in type(value).__mro__)
    method = next(
        (names["__aiter__"] for names in spaces if "__aiter__" in names), None
    )
    return callable(method)


def is_async_function(function: object) -> bool:
    """Tell whether calling ``function`` returns a coroutine."""
    while isinstance(function, functools.partial):
        function = function.func
    if function is None or isinstance(function, _FUNCTIONS):
        return inspect.iscoroutinefunction(function)
    call = getattr(type(function), "__call__", None)  # noqa: B004  (whether it is async, not whether it exists)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def generator_of(function: object) -> str | None:
    """Return the kind of generator that calling ``function`` returns, or None."""
    call = getattr(type(function), "__call__", None)  # noqa: B004  (as above)
    if inspect.isasyncgenfunction(function) or inspect.isasyncgenfunction(call):
        return "async generator"
    if inspect.isgeneratorfunction(function) or inspect.isgeneratorfunction(call):
        return "generator"
    return None


# Attributes of torch's wrappers, by method because a subclass may override it.
_WRAPPERS: dict[object, str] = {
    Subset.__getitem__: "dataset",
    ConcatDataset.__getitem__: "datasets",
    StackDataset.__getitem__: "datasets",
}


def reads_async(dataset: object) -> bool:
    """Tell whether samples of a map-style ``dataset`` are read on an event loop.

    True if ``__getitem__`` or ``__getitems__`` is a coroutine function, or if the
    dataset is torch's ``Subset``, ``ConcatDataset`` or ``StackDataset`` over such a
    dataset. Any other plain method runs off the loop; an awaitable result is awaited.
    """
    cls = type(dataset)
    item = getattr(cls, "__getitem__", None)
    if is_async_function(item) or is_async_function(getattr(cls, "__getitems__", None)):
        return True
    if item not in _WRAPPERS:
        return False
    held = getattr(dataset, _WRAPPERS[item])
    if isinstance(held, dict):
        held = list(held.values())
    return any(map(reads_async, held if isinstance(held, (list, tuple)) else [held]))


def batch_getter(dataset: object) -> Callable[[Any], Any] | None:
    """Return ``dataset.__getitems__`` if it can replace ``__getitem__``, or None.

    An inherited ``__getitems__`` ignores a subclass's own ``__getitem__``
    (pytorch/pytorch#163184). So ``__getitems__`` counts only if the class that
    defines ``__getitem__``, or a subclass of that class, defines it. For torch's
    ``Subset``, the inner dataset decides. Other plain wrappers of async datasets
    (``StackDataset``) look into the samples, so their ``__getitems__`` is not used.
    """
    is_torchs = Subset.__getitems__.__module__ == Subset.__module__  # not replaced
    if type(dataset) is Subset and is_torchs and batch_getter(dataset.dataset) is None:
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


def set_epoch_of(part: object, epoch: int | None) -> None:
    """Call ``part.set_epoch`` if it exists and ``epoch`` is not None."""
    hook = getattr(part, "set_epoch", None)
    if epoch is not None and callable(hook):
        hook(epoch)


def is_stateful(part: object) -> bool:
    """Tell whether ``part`` has torchdata's ``state_dict`` and ``load_state_dict``.

    ``state_dict`` must need no argument. A ``state_dict(destination=...)``, as in
    modules and tensordicts, returns all the data and does not count.
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


def own_datasets(dataset: Any) -> list[HasLifespan]:
    """Return aioloader's own datasets: ``dataset``, or those in torch's wrappers."""
    own: list[HasLifespan] = []
    seen: set[int] = set()
    left = [dataset]
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, HasLifespan):
            own.append(part)
        elif isinstance(part, Subset):
            left.append(vars(part).get("dataset"))
        elif isinstance(part, (ConcatDataset, ChainDataset, StackDataset)):
            inner: Any = vars(part).get("datasets") or ()
            left += inner.values() if isinstance(inner, dict) else inner
    return own
