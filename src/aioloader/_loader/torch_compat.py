"""Compatibility with frameworks that inspect torch's ``DataLoader``.

Frameworks check the class, read a loader's arguments from ``vars`` and the signature of
``__init__``, and use private names of torch's class. All of these exist here, but
torch's ``__init__``, which does not support async datasets, is not called.
"""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Generic

import torch.utils.data
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _DatasetKind
from typing_extensions import TypeVar

from aioloader._base.warnings import warn
from aioloader._loader.arguments import context_of
from aioloader._loader.options import ADDED_NAMES, TORCH_NAMES, AddedArguments
from aioloader._order.epoch import index_sampler_of
from aioloader._order.permutation import KeyedOrder
from aioloader.protocols import Kind, is_async_function, kind_of, reads_async

Batch = TypeVar("Batch", default=Any)
# Torch's class, even if a program replaces ``torch.utils.data.DataLoader`` later.
TORCH_LOADER = torch.utils.data.DataLoader
# Attributes that cannot be set after the constructor: torch's, then aioloader's.
_FIXED = {
    *("batch_size", "batch_sampler", "sampler", "drop_last", "dataset"),
    *("persistent_workers", "rank", "world_size", "tail"),
}
_VARIADIC = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


class TorchLoader(torch.utils.data.DataLoader[Any], AddedArguments, Generic[Batch]):
    """Base of ``DataLoader`` with the attributes that frameworks read from torch's.

    Every public attribute of an instance is an argument of ``__init__``, so that
    ``type(loader)(**arguments)`` makes the same loader again. Torch's private names
    here are ``_index_sampler``, ``_auto_collation``, ``_dataset_kind``,
    ``_get_iterator``, ``_iterator``, ``_IterableDataset_len_called`` and
    ``_DataLoader__initialized``.
    """

    dataset: Any
    close: Callable[[], None]
    _live: Any
    # In subclasses: aioloader's arguments, apart from attributes of the same name.
    _own: SimpleNamespace | None = None
    _is_subclassed = False
    _has_own_order = False  # overrides ``_index_sampler`` or ``_auto_collation``

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._is_subclassed = TorchLoader not in cls.__bases__
        cls._has_own_order = any(
            getattr(cls, name) is not getattr(TORCH_LOADER, name)
            for name in ("_auto_collation", "_index_sampler")
        )
        _expand_signature(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        is_fixed = name in _FIXED and not hasattr(self._own, name)
        if is_fixed and vars(self).get("_DataLoader__initialized"):
            raise ValueError(
                f"{name} attribute should not be set after {type(self).__name__} is "
                "initialized"
            )
        object.__setattr__(self, name, value)

    def _keep_arguments(self, arguments: dict[str, Any]) -> None:
        """Keep the arguments as attributes.

        In subclasses, the loader reads aioloader's arguments from ``_own``, because the
        subclass may use an argument's name for something else.
        """
        for name in TORCH_NAMES:
            setattr(self, name, arguments[name])
        added = {name: arguments[name] for name in ADDED_NAMES}
        if self._is_subclassed:
            self._own = SimpleNamespace(**added)
        for name, value in added.items():
            is_taken = name in vars(self) or hasattr(type(self), name)
            if not (self._is_subclassed and is_taken):
                setattr(self, name, value)

    def _replace(self, name: str, value: Any) -> None:
        own = self._own
        if own is None or not hasattr(own, name):
            setattr(self, name, value)
            return
        if name in vars(self) and vars(self)[name] is getattr(own, name):
            setattr(self, name, value)  # the subclass does not use the name itself
        self._own = SimpleNamespace(**{**vars(own), name: value})

    @property
    def multiprocessing_context(self) -> Any:
        """The context that chooses how worker processes start, or None."""
        return vars(self).get("multiprocessing_context")

    @multiprocessing_context.setter
    def multiprocessing_context(self, context: Any) -> None:
        """Set the context, or the one that a start method's name selects."""
        is_made = vars(self).get("_DataLoader__initialized")  # the constructor checks
        if is_made and context is not None:
            context = context_of(context, self.num_workers, self.workers)
        vars(self)["multiprocessing_context"] = context

    @property
    def _iterator(self) -> Any:
        """With persistent workers, an open iterator or a substitute; otherwise None.

        Code written for torch calls ``_shutdown_workers`` and sets this to None, so
        that new workers see a changed dataset.
        """
        if not (self.persistent_workers and self.num_workers):
            return None
        kept = SimpleNamespace(_shutdown_workers=self.close)
        return next(
            iter(self._live.iterators()), kept if self._live.has_kept() else None
        )

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        """End persistent workers when set to None, as frameworks do with torch's."""
        if iterator is not None:
            raise AttributeError("_iterator can only be set to None, to end workers")
        if self.persistent_workers and self.num_workers:
            self.close()

    @_iterator.deleter
    def _iterator(self) -> None:
        self._iterator = None

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Whether accelerate should leave the loader as it is.

        Only ``Accelerator.prepare`` reads this, so ``check_torch_suffices`` may raise.
        """
        prepared: bool | None = vars(self).get("_accelerate_prepared")
        if prepared is None:
            check_torch_suffices(self)
        return bool(prepared)

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        self._accelerate_prepared = prepared


def dataset_kind(dataset: Any, kind: Kind) -> int:
    """Return torch's constant for ``kind``; register async iterables with torch.

    Frameworks check ``isinstance(dataset, IterableDataset)`` before they add samplers.
    Classes with ``__getitem__`` are not registered: torch's loader indexes them.
    """
    cls = type(dataset)
    if kind is Kind.ASYNC_ITERABLE and not isinstance(dataset, IterableDataset):
        is_of_user = bool(cls.__flags__ & _HEAP_TYPE)
        if is_of_user and not hasattr(cls, "__getitem__"):
            IterableDataset.register(cls)
    return _DatasetKind.Map if kind is Kind.MAP else _DatasetKind.Iterable


def refuse_overridden(cls: Any, base: Any) -> None:
    """Refuse ``async for`` over a subclass that overrides only how ``for`` iterates."""
    if cls.__aiter__ is not base.__aiter__:
        return
    for name in ("__iter__", "_get_iterator"):
        if getattr(cls, name) is not getattr(base, name):
            raise TypeError(
                f"{cls.__name__} overrides {name}, which serves `for` alone: iterate "
                "with `for`, or override __aiter__ too"
            )


def refuse_keyed(loader: Any) -> None:
    """Raise if a loader that overrides torch's sampling hooks uses a ``KeyedOrder``."""
    order = index_sampler_of(loader.sampler, loader.batch_sampler)
    if isinstance(order, KeyedOrder):
        raise TypeError(
            f"{type(loader).__name__} overrides _index_sampler or _auto_collation, "
            f"which do not follow the epochs of {type(order).__name__} (rank= with "
            "shuffle=True makes one): pass a batch_sampler= instead of overriding"
        )


def check_torch_suffices(loader: TorchLoader[Any]) -> None:
    """Raise if torch's loader would make other batches; otherwise warn of its use."""
    advice = (
        "use aioloader.accelerate.prepare(accelerator, ...) instead of "
        "accelerator.prepare(...), or for transformers' Trainer the TrainerMixin there"
    )
    cls = [base for base in type(loader).__mro__ if issubclass(base, TorchLoader)][-2]
    parameters = inspect.signature(cls).parameters
    known = inspect.signature(TORCH_LOADER).parameters
    own = loader._own or loader
    lost = [
        f"{name}="
        for name, parameter in parameters.items()
        if name not in known and name not in _FOR_SPEED
        if getattr(own, name, parameter.default) != parameter.default
    ]
    if kind_of(loader.dataset) is Kind.ASYNC_ITERABLE or reads_async(loader.dataset):
        lost.append("an async dataset")
    elif kind_of(loader.dataset) is Kind.ITERABLE and not isinstance(
        loader.dataset, IterableDataset
    ):
        lost.append("an iterable that is no torch IterableDataset")
    if is_async_function(loader.collate_fn):
        lost.append("an async collate_fn")
    if loader._live.loaded is not None:
        lost.append("a loaded state")
    if lost:
        raise ValueError(
            "accelerate would replace this loader with a torch.utils.data.DataLoader, "
            f"without {', '.join(lost)}: {advice}"
        )
    warn(
        "accelerate replaces this loader with a torch.utils.data.DataLoader: the "
        "batches are the same, but torch's engine makes them; to keep this one, "
        f"{advice}"
    )


# Arguments that do not change the batches.
_FOR_SPEED = {"concurrency", "prefetch_bytes", "snapshot_every_n_steps"}


# Py_TPFLAGS_HEAPTYPE: set for classes defined in Python.
_HEAP_TYPE = 1 << 9


def _expand_signature(cls: type[TorchLoader[Any]]) -> None:
    """Replace ``**kwargs`` in a subclass's signature by its base class's parameters.

    Frameworks take ``**kwargs`` to mean torch's arguments, and drop all others when
    they rebuild the loader.
    """
    owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
    init: Any = vars(owner)["__init__"]
    if owner is not cls:
        if issubclass(owner, TorchLoader):
            return  # its signature is expanded already
        init = _wrapped(init)
    if not inspect.isfunction(init):
        return
    mine = list(inspect.signature(init).parameters.values())
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in mine):
        return
    above = next(
        base
        for base in cls.__mro__[cls.__mro__.index(owner) + 1 :]
        if "__init__" in vars(base) and issubclass(base, TORCH_LOADER)
    )
    theirs = list(inspect.signature(above.__init__).parameters.values())[1:]
    init.__signature__ = inspect.Signature(_merged(mine, theirs))  # type: ignore[attr-defined]
    if owner is not cls:
        cls.__init__ = init  # type: ignore[method-assign]


def _merged(
    mine: list[inspect.Parameter], theirs: list[inspect.Parameter]
) -> list[inspect.Parameter]:
    """Return a subclass's parameters, with its base's in place of variadic ones."""
    named = [each for each in mine if each.kind not in _VARIADIC]
    passes_all = len(named) == 1 and mine[1].kind is mine[1].VAR_POSITIONAL
    names = {each.name for each in named}
    rest = [each for each in theirs if each.name not in names]
    if not passes_all:  # ``**kwargs`` takes names only
        rest = [
            each if each.kind in _VARIADIC else each.replace(kind=each.KEYWORD_ONLY)
            for each in rest
        ]
    return sorted(named + rest, key=lambda parameter: parameter.kind)


def _wrapped(init: Any) -> Any:
    """Return a wrapper of ``init`` that can have another signature."""

    @functools.wraps(init)
    def passed_on(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)

    return passed_on
