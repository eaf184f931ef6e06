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
    """A dataset or iterator of aioloader with resources that belong to an event loop.

    Only aioloader's own classes derive from it: for a user's object the loader enters
    only the result of the argument ``lifespan``.
    """

    @abc.abstractmethod
    def lifespan(self) -> AbstractAsyncContextManager[Any]:
        """Return the context manager that each reading loop enters and leaves."""

    def fingerprint(self) -> dict[str, Any]:
        """Return JSON-ready entries of a state that identify the dataset's samples."""
        return {}


class OneIteration:
    """An iterator that cannot be copied, as torch's: a copy would take its batches."""

    def __reduce__(self) -> NoReturn:
        raise NotImplementedError(
            f"a {type(self).__name__} cannot be copied or pickled: save its position "
            "with state_dict(), and load that into a copy of the loader or stream"
        )


class BlockIterator(OneIteration, HasLifespan):
    """One iteration over an aioloader stream, which is read a block at a time."""

    # Whether several blocks may fill a batch. If not, one block is one batch: the
    # samples at its positions, some of which may be empty.
    fills: bool
    leaves_out: bool  # a failed sample has no position: the next one takes it
    at: int  # positions of the epoch that this rank had passed where it starts
    real: int | None  # how many samples of an epoch are not padding; None: all
    refills: bool  # samples of its beginning fill a short last batch

    @abc.abstractmethod
    def take(self, size: int, most: int) -> Iterable[tuple[Any, dict[str, Any]]]:
        """Yield up to ``most`` blocks of ``size`` samples that were read already.

        None of the samples failed. Each block comes with the position after it.
        """

    @abc.abstractmethod
    async def pull(self, limit: int, more: int = 0) -> Any:
        """Return the samples at the next ``limit`` positions, as a ``Block``.

        If they come quickly, up to ``more`` samples are read as well, for ``take``. If
        the iterator ``fills``, there are 1 to ``limit`` samples, and an empty block is
        the end. A sample that failed is a ``FailedSample`` in a list.

        Raises:
            StopAsyncIteration: At the end, if it does not fill.
        """

    @abc.abstractmethod
    def position(self) -> dict[str, Any]:
        """Return the position after the last block, for ``load_position``."""

    @abc.abstractmethod
    def again(self, state: dict[str, Any] | None) -> "BlockIterator":
        """Return an iteration over the same samples, from the first one or a state."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Stop pending work and wait for it to end."""


@dataclass(eq=False, repr=False)
class Outline:
    """What a loader must know about a stream before it reads an epoch."""

    ranks: tuple[int, int] | None  # our rank, and their number; None: each reads all
    world_size: int  # how many ranks share it
    readers: int | None  # how many take turns, if that is fixed
    total: int | None  # samples of an epoch of all ranks, if known
    is_endless: bool  # an epoch never ends
    continues: bool  # an epoch starts where the previous one stopped
    chosen_epoch: int | None  # the number that the user has chosen, if any
    # Names of parts without a state: resuming is exact if they repeat their samples.
    reread: list[str]
    # Returns the ``EpochEndRounds`` in which ranks agree on the end (None without a
    # store), given ``tail`` and the start: an epoch, and how many of its batches.
    end_talk: Callable[[Any, tuple[int, int]], Any]


class OwnStream(abc.ABC):
    """A stream of aioloader: an async iterable that knows about epochs and ranks."""

    @abc.abstractmethod
    def outline(self, ranks: tuple[int, int] | None = None) -> Outline:
        """Return the outline as of now; ``ranks``: a rank and the number of ranks."""

    @abc.abstractmethod
    def for_epoch(
        self,
        ranks: tuple[int, int] | None = None,
        tail: Any = "uneven",
        *,
        has_peers: bool = False,
        is_skipped: bool = False,
    ) -> "OwnStream":
        """Return a copy to iterate, also in workers; it takes over a loaded state.

        Args:
            ranks: A rank, and the number of ranks; None: as the stream is sharded.
            tail: How the ranks get equal parts.
            has_peers: Whether other processes read the same part.
            is_skipped: Whether failed samples are left out.
        """

    @abc.abstractmethod
    def following(
        self, state: dict[str, Any], epoch: int, workers: int = 1
    ) -> dict[str, Any]:
        """Return where ``epoch`` starts if the iterator before it stopped at ``state``.

        For streams that continue across epochs, read by ``workers`` of each rank. The
        user may have chosen another epoch.
        """

    @abc.abstractmethod
    def fitted(self, state: dict[str, Any], *, strict: bool = True) -> dict[str, Any]:
        """Return the state of an iterator, converted for this stream.

        ``strict``: shards must have the same versions, not only the same lengths.

        Raises:
            StateMismatchError: If the state does not fit this stream.
        """

    @abc.abstractmethod
    def load_position(self, state: dict[str, Any]) -> None:
        """Start the next iteration at the ``position`` of an iterator."""


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
        is_begun: Whether an epoch of it has begun.
        readers: How many workers would each read a copy of it.

    Raises:
        TypeError: If it is: samples would be missing, or come from each worker.
    """
    is_once = isinstance(dataset, (Iterator, AsyncIterator))
    if not is_once or type(dataset).__module__ not in {"builtins", "itertools"}:
        return  # a user's own may start again
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

    ``__aiter__ = None`` means that it has none. Unlike ``hasattr`` this has no side
    effects: a ``MagicMock`` makes any method that is looked up.
    """
    spaces = (vars(cls) for cls in type(value).__mro__)
    method = next(
        (names["__aiter__"] for names in spaces if "__aiter__" in names), None
    )
    return callable(method)


def is_async_function(function: object) -> bool:
    """Tell whether calling ``function`` gives a coroutine."""
    while isinstance(function, functools.partial):
        function = function.func
    if function is None or isinstance(function, _FUNCTIONS):
        return inspect.iscoroutinefunction(function)
    call = getattr(type(function), "__call__", None)  # noqa: B004  (whether it is async, not whether it exists)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def generator_of(function: object) -> str | None:
    """Return what kind of generator calling ``function`` gives, if any."""
    call = getattr(type(function), "__call__", None)  # noqa: B004  (as above)
    if inspect.isasyncgenfunction(function) or inspect.isasyncgenfunction(call):
        return "async generator"
    if inspect.isgeneratorfunction(function) or inspect.isgeneratorfunction(call):
        return "generator"
    return None


# Torch's wrappers, by their methods: a subclass's methods may do anything.
_WRAPPERS: dict[object, str] = {
    Subset.__getitem__: "dataset",
    ConcatDataset.__getitem__: "datasets",
    StackDataset.__getitem__: "datasets",
}


def reads_async(dataset: object) -> bool:
    """Tell whether samples of a map-style ``dataset`` are read on an event loop.

    They are if its method is a coroutine function, or if it is torch's ``Subset``,
    ``ConcatDataset`` or ``StackDataset`` over such a dataset. Any other plain method
    runs off the loop; if it returns an awaitable, that is awaited.
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
    """Return ``dataset.__getitems__`` if it can replace ``__getitem__``.

    A subclass that overrides only ``__getitem__`` would get its parent's rows from an
    inherited ``__getitems__`` (pytorch/pytorch#163184), so it counts only if it is
    defined on the class of ``__getitem__`` or a subclass. Torch's ``Subset`` delegates
    to the inner dataset, which decides there. Other plain wrappers of async datasets
    (``StackDataset``) look into the samples, so theirs is not used.
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
    """Call ``set_epoch`` if ``part`` has it and there is a number."""
    hook = getattr(part, "set_epoch", None)
    if epoch is not None and callable(hook):
        hook(epoch)


def is_stateful(part: object) -> bool:
    """Tell whether ``part`` follows torchdata's state protocol.

    Its ``state_dict`` must need no argument. A ``state_dict(destination=...)``, as of
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
