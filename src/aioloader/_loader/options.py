"""The arguments of a loader, frozen for an iteration, and values derived from them.

They are copied from the loader's attributes when an iterator is made: a later
assignment takes effect with the next iteration.
"""

import multiprocessing
import operator
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.utils.data import TensorDataset

from aioloader._base.failures import OnError, Skip, parts_of
from aioloader._base.machine import lack_of_linux
from aioloader._base.retry import Retry
from aioloader._base.warnings import warn
from aioloader._collate.collate import (
    collates_as_torch,
    collates_quickly,
    default_collate,
)
from aioloader._collate.gather import gatherable
from aioloader._device.naming import Device, current_accelerator, device_of
from aioloader._order.epoch import index_sampler_of, order_of
from aioloader._order.indices import IndexOrder, Order, State
from aioloader._order.ranks import RankPart, ReaderAssignment, evened
from aioloader._workers.ray.workers import RayWorkers
from aioloader._workers.rng import Rng
from aioloader.protocols import (
    Kind,
    Outline,
    OwnStream,
    batch_getter,
    is_async_function,
    is_stateful,
    kind_of,
    reads_async,
)

_LIST_GETTERS = (list.__getitem__, tuple.__getitem__)
# Arguments that may be "auto", and their first values.
FIRST_VALUES = {"num_workers": 1, "prefetch_factor": 2, "concurrency": 32}


class Auto(int):
    """The current value of an argument that is ``"auto"``."""

    def __repr__(self) -> str:
        return f"auto({int(self)})"


def auto_number(name: str, value: Any) -> Any:
    """Return ``value``, or the argument's first ``Auto`` value if it is ``"auto"``."""
    is_auto = isinstance(value, str) and value == "auto"
    return Auto(FIRST_VALUES[name]) if is_auto else value


class AddedArguments:
    """The arguments that torch's loader lacks, as attributes."""

    snapshot_every_n_steps: int | None
    transform: Callable[[Any], Any] | None
    concurrency: int
    device: Any
    workers: Any
    fetch: str
    rng: Rng | None
    on_timeout: str
    loop: str
    on_error: OnError | Skip
    retry: Retry | None
    rank: Any
    world_size: int | None
    tail: Any
    lifespan: Any
    prefetch_bytes: int | None


class Options(AddedArguments):
    """The arguments of ``DataLoader``, under their names.

    Attributes:
        values: All arguments, in the order of ``NAMES``.
        part: The part of each global batch that this rank delivers.
        chooses: Whether any argument is ``"auto"``.
        follows_concurrency: Whether ``concurrency`` determines the number of batches in
            flight, because ``prefetch_factor`` is None or ``"auto"``.
        on_failure: What to do with a failed sample.
        at_most: Limit on failed samples (a count or a fraction of all), or None.
        kind: Whether the dataset is map-style, iterable or async iterable.
        is_own_stream: Whether the dataset is one of aioloader's streams.
        is_list: Whether the dataset is a list or a tuple.
        reads_async: Whether samples are read asynchronously.
        is_plain: Whether reading, ``transform`` and ``collate_fn`` are not async.
        batched: Whether samples are collated into batches.
        has_processes: Whether worker processes make batches.
        patience: How many seconds a consumer waits for a batch; None: no limit.
        is_keyed: Whether each batch (or sample) has a seed, as by default with workers.
    """

    dataset: Any
    batch_size: int | None
    sampler: Any
    batch_sampler: Any
    num_workers: int
    collate_fn: Callable[[Any], Any]
    pin_memory: bool
    drop_last: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool

    def __init__(self, values: tuple[Any, ...], part: RankPart) -> None:
        vars(self).update(zip(NAMES, values, strict=True))
        self.values = values
        self.part = part
        numbers = self.num_workers, self.prefetch_factor, self.concurrency
        is_limit = 0 < self.timeout < threading.TIMEOUT_MAX
        self.chooses = any(isinstance(number, (Auto, str)) for number in numbers)
        factor = self.prefetch_factor
        self.follows_concurrency = factor is None or isinstance(factor, Auto)
        self.on_failure, self.at_most = parts_of(self.on_error)
        self.kind = kind = kind_of(self.dataset)
        self.is_own_stream = isinstance(self.dataset, OwnStream)
        self.is_list = getattr(type(self.dataset), "__getitem__", None) in _LIST_GETTERS
        is_async = kind is Kind.MAP and reads_async(self.dataset)
        self.reads_async = kind is Kind.ASYNC_ITERABLE or is_async
        self.transforms_async = is_async_function(self.transform)
        self.collates_async = is_async_function(self.collate_fn)
        is_async = self.reads_async or self.transforms_async or self.collates_async
        self.is_plain = not is_async
        self.batched = self.batch_sampler is not None
        self.has_processes = bool(self.num_workers) and self.workers == "process"
        self.patience: float | None = self.timeout if is_limit else None
        self.is_keyed = self.rng in {"batch", "sample"} or (
            self.rng is None and bool(self.num_workers)
        )

    @cached_property
    def is_stateful(self) -> bool:
        return is_stateful(self.dataset)

    @cached_property
    def reads_in_workers(self) -> bool:
        """Whether workers read samples themselves.

        With ``fetch="auto"``, processes read all datasets but async iterables. Threads
        and executors read plain map-style datasets, and Ray's actors any map-style one.
        """
        if self.fetch != "auto":
            return self.fetch == "workers"
        if self.workers == "process":
            return self.kind is not Kind.ASYNC_ITERABLE
        functions = self.transform, self.collate_fn
        return suits(self.workers, self.dataset, *functions)

    @property
    def pool_reads(self) -> bool | None:
        """Whether the pool's workers read samples; None if no pool is needed."""
        reads = self.reads_in_workers
        is_idle = not self.num_workers or (not reads and self.collates_async)
        return None if is_idle else reads

    @cached_property
    def readers(self) -> int:
        """The number of workers that each read a part of an iterable; 1 if none do."""
        is_replicated = self.kind is not Kind.MAP and self.reads_in_workers
        return max(1, self.num_workers) if is_replicated else 1

    def outline(self, part: RankPart | None = None) -> Outline:
        """Return the ``Outline`` of the dataset, an aioloader stream, for this rank."""
        part = part or self.part
        ranks = None if self.rank is None else (part.rank, part.world_size)
        outline: Outline = self.dataset.outline(ranks)
        return outline

    def for_epoch(self, stream: OwnStream) -> OwnStream:
        """Return this rank's part of an aioloader stream, to be read in one epoch."""
        part, is_skipped = self.part, self.on_failure == "skip"
        ranks = None if self.rank is None else (part.rank, part.world_size)
        tail, has_peers = self.tail or "wrap", part.has_peers
        return stream.for_epoch(ranks, tail, has_peers=has_peers, is_skipped=is_skipped)

    @property
    def has_copies(self) -> bool:
        """Whether worker processes have copies of the dataset."""
        return self.has_processes and self.reads_in_workers

    @property
    def engine(self) -> tuple[str, ...]:
        """The names of modules to import before a pipeline makes batches."""
        names = ["aioloader._loader.sources"]
        if self.has_processes:
            names.append("aioloader._workers.process.pool")
        if not self.is_plain:
            names += ["aioloader._pipeline.loop_watch", "anyio._backends._asyncio"]
        return tuple(names)

    @property
    def start_method(self) -> str:
        """The start method of worker processes; "spawn" where forking is unsupported.

        Not cached: the program may change its default at any time.
        """
        context = self.multiprocessing_context
        if lack_of_linux():
            return "spawn"
        if context is not None:
            return str(context.get_start_method())
        method = multiprocessing.get_start_method(allow_none=True)
        if method is None:  # not set yet; get_start_method() would set it
            method = multiprocessing.get_all_start_methods()[0]
        # Event loops and their clients do not survive a fork: only an explicit context
        # forks them.
        return "forkserver" if method == "fork" and not self.is_plain else method

    def starts_at_iter(self, *, is_async: bool) -> bool:
        """Tell whether ``iter()`` starts worker processes, as in torch.

        A fork must happen now and in this thread. Other start methods would block the
        event loop of an async consumer, so they wait for its first step.
        """
        return not is_async or self.start_method == "fork"

    @property
    def pins(self) -> bool:
        """Whether batches are pinned and stay on the CPU; reading this may warn."""
        is_wanted = self.pin_memory and self.target.name is None
        return is_wanted and _can_pin(self.pin_memory_device)

    @cached_property
    def target(self) -> Device[Any]:
        """The ``Device`` to move batches to; without a name they stay in CPU memory."""
        target = self.device if isinstance(self.device, Device) else Device(self.device)
        if target.name is None or isinstance(target.name, torch.device):
            return target
        return replace(target, name=device_of(target.name))  # assigned by the user

    @cached_property
    def is_moved(self) -> bool:
        """Whether a device stage moves or transforms the batches of the pipeline."""
        if self.device is None:
            return False
        return self.target.name is not None or self.target.transform is not None

    @cached_property
    def is_inline(self) -> bool:
        """Whether a plain ``for`` makes batches in the caller's thread, as in torch."""
        ahead = self.patience or self.prefetch_factor or self.num_workers
        return self.is_plain and not (ahead or self.is_moved)

    @property
    def gathered(self) -> tuple[torch.Tensor, ...] | None:
        """The dataset's tensors if batches can be gathered from them, or None."""
        is_more = (
            self.num_workers
            or self.pin_memory
            or self.is_moved
            or self.transform is not None
            or self.lifespan is not None
            or self.part.tail == "pad"
            or self.collate_fn is not default_collate
        )
        return None if is_more or not collates_as_torch() else gatherable(self.dataset)

    @cached_property
    def is_bare(self) -> bool:
        """Whether a plain ``for`` only reads samples one by one and collates them."""
        is_more = (
            self.transform is not None
            or self.retry is not None
            or self.on_error != "raise"
            or self.lifespan is not None
            or self.pin_memory
            or self.is_keyed
            or self.part.tail == "pad"
        )
        is_one_by_one = not self.batched or batch_getter(self.dataset) is None
        is_map = self.kind is Kind.MAP and type(self.dataset) is not TensorDataset
        return self.is_inline and is_map and is_one_by_one and not is_more

    def is_at_hand(self, order: Order) -> bool:
        """Tell whether collating is cheapest in the caller's thread.

        The first and the last sample decide; collating them runs no user code.
        """
        size, is_any = order.size or 1, self.batched and order.size == 1
        if is_any or not (self.is_bare and isinstance(order, IndexOrder)):
            return False
        first, last = self.dataset[:1] * size, self.dataset[-1:] * size
        is_quick = collates_quickly(self.collate_fn, first)
        return is_quick and collates_quickly(self.collate_fn, last)

    @property
    def index_sampler(self) -> Any:
        """The sampler that determines the order, such as a custom batch sampler."""
        return index_sampler_of(self.sampler, self.batch_sampler)

    @property
    def global_batch_size(self) -> int | None:
        """Samples per batch on all ranks together; None with a custom batch sampler."""
        size = self.batch_size or 1
        if self.batch_sampler is not None:
            if self.index_sampler is self.batch_sampler:
                return None
            size = self.batch_sampler.batch_size
        return size * self.part.world_size

    @cached_property
    def order_of(self) -> Callable[[State | None], Order]:
        """A function that returns a new epoch's order, or restores one from a state."""
        if self.kind is Kind.MAP:
            return partial(order_of, self.sampler, self.batch_sampler, self.part)
        size, part = self.batch_size, self.part  # a closure over self would be a cycle
        return lambda _saved: Order(size, part)

    def length(self, part: RankPart | None = None) -> int:
        """Return the number of batches per epoch on this rank, or raise a TypeError."""
        part, batches = part or self.part, self.batch_sampler
        if self.is_own_stream:
            return self._stream_length(part)
        if self.kind is not Kind.MAP:
            size, drop_last = self.batch_size or 1, self.drop_last
            return part.batches(len(self.dataset), size, drop_last=drop_last)
        sampler, size, drop_last = self.index_sampler, 1, False
        count = len(sampler)
        if batches is not None and sampler is not batches:
            size, drop_last = batches.batch_size, batches.drop_last
        return part.batches(count, size, drop_last=drop_last)

    @property
    def samples(self) -> int | None:
        """The number of map-style samples on this rank; None if unknown or unneeded.

        Only an ``on_error`` that allows a fraction of the samples to fail needs this.
        """
        is_share = isinstance(self.at_most, float) and self.kind is Kind.MAP
        if is_share and self.global_batch_size is not None:
            with suppress(Exception):  # torch iterates without this length
                return -(-len(self.index_sampler) // self.part.world_size)
        return None

    def _stream_length(self, part: RankPart) -> int:
        """Return how many batches of a stream this rank's workers make in an epoch."""
        outline, workers = self.outline(part), self.readers
        rank, world_size = outline.ranks or (0, 1)
        if outline.total is None:
            len(self.dataset)  # raises the TypeError
        ranks = world_size * workers
        tail = "uneven" if world_size == 1 else self.tail or "wrap"
        count, size = evened(outline.total or 0, ranks, tail), self.batch_size or 1
        counts = [
            ReaderAssignment(rank * workers + worker, ranks, ranks).part(count)
            for worker in range(workers)
        ]
        return sum(n // size if self.drop_last else -(-n // size) for n in counts)


def suits(workers: Any, dataset: Any, *functions: Any) -> bool:
    """Tell whether threads, executors or Ray's actors can read, transform and collate.

    None of them reads iterables; threads and executors run only plain code.
    """
    if kind_of(dataset) is not Kind.MAP or isinstance(workers, RayWorkers):
        return kind_of(dataset) is Kind.MAP
    return not (reads_async(dataset) or any(map(is_async_function, functions)))


def _can_pin(pin_memory_device: str) -> bool:
    """Tell whether batches can be pinned; warn, as torch does, where they cannot."""
    if pin_memory_device:
        warn(
            "pin_memory_device is deprecated, the current accelerator will be used as "
            f"the device, ignore pin_memory_device='{pin_memory_device}'."
        )
    accelerator = current_accelerator()
    if accelerator is None:
        warn(
            "'pin_memory' argument is set as true but no accelerator is found, then "
            "device pinned memory won't be used."
        )
    elif accelerator.type == "mps":
        warn(
            "'pin_memory' argument is set as true but not supported on MPS now, device "
            "pinned memory won't be used."
        )
    return accelerator is not None and accelerator.type != "mps"


TORCH_NAMES = tuple(Options.__annotations__)
ADDED_NAMES = tuple(AddedArguments.__annotations__)
NAMES = TORCH_NAMES + ADDED_NAMES
_torch_args = operator.attrgetter(*TORCH_NAMES)
_added_args = operator.attrgetter(*ADDED_NAMES)


def attributes_of(loader: Any) -> tuple[Any, ...]:
    """Return the current values of a loader's arguments, ordered as ``NAMES``."""
    values: tuple[Any, ...] = _torch_args(loader) + _added_args(loader._own or loader)
    if loader._has_own_order and vars(loader).get("_DataLoader__initialized"):
        return _reordered(loader, dict(zip(NAMES, values, strict=True)))
    return values


def _reordered(loader: Any, values: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values, with a subclass's ``_index_sampler`` as the sampler."""
    order = loader._index_sampler
    is_own = not any(order is values[name] for name in ("sampler", "batch_sampler"))
    if is_own and kind_of(loader.dataset) is not Kind.MAP:
        raise TypeError(
            f"{type(loader).__name__} overrides _index_sampler, but nothing samples an "
            "iterable dataset: make the batches there, and pass batch_size=None"
        )
    if loader._auto_collation:
        values["batch_sampler"] = order
    else:
        values |= {"sampler": order, "batch_sampler": None, "batch_size": None}
    return tuple(values.values())


def argument(loader: Any, name: str) -> Any:
    """Return a loader's argument from where ``_keep_arguments`` has stored it."""
    return getattr(loader if name in TORCH_NAMES else loader._own or loader, name)
