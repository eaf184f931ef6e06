"""The loader: torch's arguments, the iterators, epochs.

It checks its arguments and delegates; it reads and schedules nothing itself.
"""

import contextlib
import operator
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch.utils.data._utils import collate as torch_rules

from aioloader._base.failures import Failure, OnError, Skip
from aioloader._base.records import Counters
from aioloader._base.retry import Retry
from aioloader._collate.collate import OURS
from aioloader._device.naming import Device, found_here
from aioloader._loader import arguments, auto, torch_compat
from aioloader._loader.options import NAMES, Options, attributes_of, auto_number
from aioloader._loader.runtime import Runtime
from aioloader._loader.sampling import (
    check_batches,
    end_talk,
    make_samplers,
    own_order,
    part_asked,
    part_now,
    repeats_samples,
    settle_shuffle,
    tell_epoch,
    warn_of_repeats,
)
from aioloader._loader.state import State, unsealed
from aioloader._loader.torch_compat import Batch, TorchLoader, dataset_kind
from aioloader._order.epoch import EpochNumbers, index_sampler_of
from aioloader._order.ranks import WHOLE, Tail
from aioloader._order.stream_states import mixed
from aioloader._pipeline.iterator import BatchIterator, IteratorCore, length_check
from aioloader._pipeline.lifespan import MakeLifespan
from aioloader._workers.rng import Rng
from aioloader.protocols import Kind, refuse_again

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from aioloader._loader import signature as sig
    from aioloader._observe.stats import LoaderStats
    from aioloader._observe.trace import Trace
    from aioloader._observe.verdict import Report


class _Shown:
    """An attribute that a subclass or its instances may replace; no property may."""

    def __init__(self, get: Callable[[Any], int]) -> None:
        self._get = get

    def __get__(self, loader: Any, _cls: type) -> int:
        if loader is None:  # only instances have it
            raise AttributeError
        return self._get(loader)


class DataLoader(TorchLoader[Batch]):
    """Load batches from a dataset, for ``async for`` and for ``for``.

    A drop-in for ``torch.utils.data.DataLoader``: the same first seventeen arguments,
    order and batches; in workers, random numbers follow ``rng``. Coroutine functions
    (``async __getitem__``, ``__aiter__``, an async ``transform``) run on an event loop,
    ``concurrency`` samples at a time and across batch boundaries; plain functions run
    off it.

    Example:
        >>> loader = DataLoader(list(range(6)), batch_size=4)
        >>> [batch.tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5]]

    Attributes:
        epoch: The number of the epoch under way, from 0; else of the next one. It is
            that of ``state_dict()``.

    Args:
        dataset: Map-style, iterable or async iterable; no base class is needed.
        batch_size: Samples per batch; ``None`` delivers single samples.
        shuffle: Visit a map-style dataset in a new random order each epoch.
        sampler: Yields indices; excludes ``shuffle``.
        batch_sampler: Yields lists of indices; excludes the three above and
            ``drop_last``.
        num_workers: Worker processes (or threads) that make batches. ``"auto"``: none
            for tensors in memory or if all code is async, otherwise one per core at
            first (at most 8); it changes between epochs as long as that helps, but not
            with ``persistent_workers``. Refused where samples or random numbers depend
            on it. On a Python without the GIL it chooses threads for a plain map-style
            dataset, which they share.
        collate_fn: Turns a list of samples into a batch; may be async.
        pin_memory: Copy batches into page-locked memory.
        drop_last: Drop a short last batch.
        timeout: Seconds to wait for a batch, from its request; 0: no limit.
        worker_init_fn: Called in each worker with its number.
        multiprocessing_context: Start method of workers.
        generator: Source of the shuffle order and of ``base_seed``.
        prefetch_factor: Limit on batches requested and not yet delivered, per worker
            (without workers, in total, which torch refuses). ``None``: by kind of
            dataset, see "Defaults" in the guide to workers. ``"auto"``: starts with
            that, and grows as long as that helps.
        persistent_workers: Keep workers between epochs.
        pin_memory_device: Deprecated, as in torch.
        in_order: Deliver batches in the sampler's order; otherwise as they complete.
        snapshot_every_n_steps: Accepted for compatibility with torchdata: the loader
            takes the state of a dataset or iterator after each batch.
        transform: Turns a sample into another, before collating; may be async.
        concurrency: Samples in flight on the loop, and threads that
            ``asyncio.to_thread`` may use on the loader's own. ``"auto"``: 32 at first,
            then as many as help, up to 1,024; in workers that read, 64. The logger
            ``"aioloader"`` logs what ``"auto"`` changes, and why.
        device: Where batches are delivered, such as ``"cuda:1"``, a local rank, a
            ``DeviceMesh`` of one dimension (this rank's device), or ``"auto"`` (the
            accelerator, if there is one). Batches are moved ahead on a side stream and
            delivered without making your thread wait. A ``Device`` also says how many
            are moved ahead, which of their entries, and a transform to run there.
        workers: ``"process"``, ``"thread"`` (for code that releases the GIL), a
            ``concurrent.futures.Executor``, or ``RayWorkers``.
        fetch: Where samples are read: ``"workers"``, ``"loader"`` (workers transform
            and collate), or ``"auto"``: the loader reads async iterables, workers
            read the rest.
        rng: What random numbers depend on: the ``"batch"`` (with workers the default),
            the ``"sample"``'s position in the epoch, or the ``"worker"``, as in torch.
            Without workers, the state of the global generators is restored afterwards.
        on_timeout: ``"raise"``, or ``"restart"`` the worker that delays the batch.
        loop: ``"thread"``: the loader's own loop in a private thread, which keeps
            running while the consumer computes; ``"caller"``: the loop that iterates.
        on_error: ``"raise"``; ``"skip"`` a failed sample (its batch is smaller); a
            callable that maps a ``Failure`` to a replacement or ``SKIP``; or a
            ``Skip``, which limits how many may fail in an epoch.
        retry: When to read a sample again.
        rank: Which part of each global batch is delivered, of ``world_size`` parts;
            ``"auto"``: from ``torch.distributed``, else RANK and WORLD_SIZE, at
            ``iter``; or a ``DeviceMesh`` of one dimension, such as ``mesh["dp"]``:
            ranks that differ in other dimensions only deliver the same batches. By
            default every rank gets all samples, as in torch.
        world_size: Number of ranks.
        tail: What happens to a last global batch that cannot be split evenly:
            ``"wrap"`` (the default): it is filled with samples from the beginning, as
            in torch; ``"pad"``: the same, and each batch is a pair ``(batch, mask)``;
            ``"drop"``; or ``"uneven"``. Streams of unknown length have no default.
        lifespan: Maps the dataset to a context manager, plain or async: entered where
            samples are read (once here, or in each worker process), left at the end.
        prefetch_bytes: Limit on the bytes of batches requested and not yet delivered,
            estimated from the largest recent one; one batch is always requested.

    Raises:
        ValueError: If arguments exclude each other, in torch's words.
        TypeError: If one is of the wrong type.
    """

    dataset: Any
    batch_size: int | None
    sampler: Any
    batch_sampler: Any
    collate_fn: Any
    prefetch_factor: int | None
    _live: Runtime
    epoch: _Shown = _Shown(lambda loader: loader._live.epoch_number())

    # The type of a batch: see `signature`. The first overload that matches wins.
    @overload
    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        *,
        collate_fn: "Callable[[Any], Awaitable[Batch]]",
        transform: Callable[[Any], Any] | None = None,
        **arguments: "Unpack[sig.Arguments]",
    ) -> None: ...
    @overload
    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        *,
        collate_fn: Callable[[Any], Batch],
        transform: Callable[[Any], Any] | None = None,
        **arguments: "Unpack[sig.Arguments]",
    ) -> None: ...
    @overload
    def __init__(
        self: "DataLoader[Any]",
        dataset: Any,
        batch_size: int = 1,
        *,
        transform: "sig.Transform[sig.Opaque]",
        **arguments: "Unpack[sig.Arguments]",
    ) -> None: ...
    @overload
    def __init__(
        self: "DataLoader[torch.Tensor]",
        dataset: Any,
        batch_size: int = 1,
        *,
        transform: "sig.Transform[sig.Number]",
        **arguments: "Unpack[sig.Arguments]",
    ) -> None: ...
    @overload
    def __init__(
        self: "DataLoader[list[torch.Tensor]]",
        dataset: Any,
        batch_size: int = 1,
        *,
        transform: "sig.Transform[tuple[sig.Number, ...]]",
        **arguments: "Unpack[sig.Arguments]",
    ) -> None: ...
    @overload
    def __init__(
        self: "DataLoader[dict[sig.K, torch.Tensor]]",
        dataset: Any,
        batch_size: int = 1,
        *,
        transform: "sig.Transform[dict[sig.K, sig.V]]",
        **arguments: "Unpack[sig.Arguments]",
    ) -> None: ...
    @overload
    def __init__(
        self: "DataLoader[Any]",
        dataset: "sig.Samples[sig.Opaque]",
        batch_size: int = 1,
        **arguments: "Unpack[sig.Arguments]",
    ) -> None: ...
    @overload
    def __init__(
        self: "DataLoader[torch.Tensor]",
        dataset: "sig.Samples[sig.Number]",
        batch_size: int = 1,
        **arguments: "Unpack[sig.Arguments]",
    ) -> None: ...
    @overload
    def __init__(
        self: "DataLoader[list[torch.Tensor]]",
        dataset: "sig.Samples[tuple[sig.Number, ...]]",
        batch_size: int = 1,
        **arguments: "Unpack[sig.Arguments]",
    ) -> None: ...
    @overload
    def __init__(
        self: "DataLoader[dict[sig.K, torch.Tensor]]",
        dataset: "sig.Samples[dict[sig.K, sig.V]]",
        batch_size: int = 1,
        **arguments: "Unpack[sig.Arguments]",
    ) -> None: ...
    @overload
    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        transform: Callable[[Any], Any] | None = None,
        tail: Tail | None = None,
        device: "sig.DeviceLike | Device[Any]" = None,
        **arguments: "Unpack[sig.KeywordOnly]",
    ) -> None: ...
    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | Literal["auto"] | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        snapshot_every_n_steps: int | None = 1,
        transform: Callable[[Any], Any] | None = None,
        concurrency: int | Literal["auto"] = 64,
        device: Any = None,
        workers: arguments.Workers = "process",
        fetch: Literal["auto", "loader", "workers"] = "auto",
        rng: Rng | None = None,
        on_timeout: Literal["raise", "restart"] = "raise",
        loop: Literal["thread", "caller"] = "thread",
        on_error: OnError | Skip = "raise",
        retry: Retry | None = None,
        rank: Any = None,
        world_size: int | None = None,
        tail: Tail | None = None,
        lifespan: MakeLifespan | None = None,
        prefetch_bytes: int | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            arguments.refuse(unknown)
        if shuffle is not None:
            dataset, shuffle = settle_shuffle(dataset, shuffle)
        num_workers = arguments.count_workers(num_workers, workers)
        prefetch_factor = auto_number("prefetch_factor", prefetch_factor)
        concurrency = auto_number("concurrency", concurrency)
        if device is not None:
            device = found_here(device)
        arguments.check_each(locals())
        self._hold(locals())
        options = Options(attributes_of(self), WHOLE)
        arguments.check_together(options, shuffle)
        if options.chooses:
            auto.begin(self, options)
        if multiprocessing_context is not None:
            context = multiprocessing_context, self.num_workers, workers
            self.multiprocessing_context = arguments.context_of(*context)
        given = self._given_part = part_asked(rank, world_size, tail, dataset)
        if given is not None and given.has_peers:  # by a mesh
            self._replace("rank", given.rank)
            self._replace("world_size", given.world_size)
        self._may_repeat = repeats_samples(options, shuffle)
        made = make_samplers(options, given, shuffle)
        self.sampler, self.batch_sampler, self.batch_size = made
        if collate_fn is None:
            name = "default_collate" if self._auto_collation else "default_convert"
            found = getattr(torch_rules, name)  # a program may have replaced it
            collate_fn = OURS.get(found, found)
        self.collate_fn = collate_fn
        self._dataset_kind = dataset_kind(dataset, options.kind)
        self._IterableDataset_len_called = None
        if self._has_own_order:
            torch_compat.refuse_keyed(self)
        self._epochs = EpochNumbers(index_sampler_of(self.sampler, self.batch_sampler))
        self._live = Runtime(dataset, self._epochs)
        # As checked: an iteration need not check what was not assigned meanwhile.
        options = self._live.options = Options(attributes_of(self), WHOLE)
        if self.num_workers:
            self._live.warm(options)
        self.__initialized = True  # from here on ``__setattr__`` guards

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_live": self._live.loaded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = own_order(state["sampler"], state["batch_sampler"])
        self.__dict__.update(state, sampler=own[0], batch_sampler=own[1])
        self._epochs = self._epochs.copy(index_sampler_of(*own))
        self._live = Runtime(self.dataset, self._epochs, loaded=state["_live"])

    def __iter__(self) -> BatchIterator[Batch]:  # type: ignore[override]
        return self._get_iterator()

    def __aiter__(self) -> BatchIterator[Batch]:
        torch_compat.refuse_overridden(type(self), DataLoader)
        return self._iterate(is_async=True)

    def _get_iterator(self) -> BatchIterator[Batch]:  # type: ignore[override]
        return self._iterate(is_async=False)

    def _options(self, *, settles: bool = False) -> Options:
        """Return the arguments as they are now, and what follows from them."""
        live = self._live
        part = (None if settles else live.part) or part_now(self)
        if settles:  # an iteration starts: it fixes the ranks that are looked up
            if live.part not in {None, part}:
                live.replace_workers()
            live.part = part
            if self._may_repeat and warn_of_repeats():
                self._may_repeat = False
        values, known = attributes_of(self), live.options
        if known is None or any(map(operator.is_not, values, known.values)):
            arguments.check_each(dict(zip(NAMES, values, strict=True)))
            known = None
        if known is None or known.part != part:
            known = live.options = Options(values, part)
        return known

    def __len__(self) -> int:
        """Return the number of batches of an epoch.

        Raises:
            TypeError: If the dataset or the sampler has no length.
        """
        options = self._options()
        length = options.length(part_now(self))
        if options.kind is not Kind.MAP and not options.is_own_stream:
            self._IterableDataset_len_called = len(self.dataset)  # type: ignore[assignment]
        return length

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, here and in sampler and dataset.

        Workers that persist set it in their copies of the dataset, too.
        """
        loaded = self._live.loaded
        if loaded is not None and loaded.epoch != epoch:
            self._live.loaded = None  # another epoch is requested, from its start
        self._epochs.choose(epoch)
        tell_epoch((self.sampler, self.batch_sampler), self.dataset, epoch)

    def _iterate(self, *, is_async: bool) -> BatchIterator[Batch]:
        """Return an iterator; worker processes start with it, as in torch."""
        live = self._live
        refuse_again(self.dataset, is_begun=live.epoch is not None)
        options = self._options(settles=True)
        if options.chooses:
            auto.settle(self)
            options = self._options()
        refuse_again(options.dataset, is_begun=False, readers=options.readers)
        if options.is_own_stream:
            end_talk(options)  # or refuse
            check_batches(options)
        epoch, seed = None, None if live.loaded is None else live.loaded.seed
        if seed is None:
            epoch = live.draw(options, live.loaded)
            seed = epoch.base_seed
        # Otherwise the epoch starts at the first step: an unused iterator is no epoch.
        steps = IteratorCore(
            partial(live.prepare, options, epoch, is_async=is_async),
            live.begin,
            options.engine if is_async or not options.is_bare else (),
            None if self._IterableDataset_len_called is None else length_check(self),
        )
        if options.has_processes and options.starts_at_iter(is_async=is_async):
            seed = steps.prepare_now().epoch.base_seed
        iterator: BatchIterator[Batch] = BatchIterator(
            steps, self.__len__, seed, is_async=is_async
        )
        live.open[iterator] = None
        if steps.prepared is not None:
            steps.prepared.open(requests=not is_async)
        return iterator

    def state_dict(self) -> State:
        """Return the position after the last batch that was delivered.

        It is small, takes microseconds, and may be called at any time, from any
        thread. It is ready for JSON if the states of the user's own parts are.
        """
        return self._live.state_dict(self._options)

    def load_state_dict(self, state: State, *, strict: bool = True) -> None:
        """Let the next iteration start where ``state_dict`` was called.

        Iterables without a state are read again up to there. An empty state is ignored.

        Args:
            state: The state.
            strict: Whether shards must have the same times or ETags as when it was
                saved; if not (they are copies), only their lengths are compared.

        Raises:
            StateMismatchError: If it does not fit this loader; says what differs.
        """
        if state == {}:
            return
        found, options = unsealed(state), self._options(settles=True)
        self._live.load_state_dict(options, found, strict=strict)

    def stats(self) -> "LoaderStats":
        """Return the statistics of the latest epoch so far; ``print`` shows a table."""
        from aioloader._observe.stats import Listed, LoaderStats, SourceStats

        epoch, supervisors = self._live.epoch, self._live.pools.supervisors
        counters = Counters() if epoch is None else epoch.counters
        policy = None if epoch is None else epoch.policy
        is_under_way = any(one.is_under_way() for one in self._live.iterators())
        shards, seconds = counters.listed_shards, counters.listed_seconds
        return LoaderStats(
            epoch=counters.epoch,
            batches=counters.batches,
            waited=counters.waited,
            in_flight=counters.in_flight if is_under_way else 0,
            failures=0 if policy is None else policy.count,
            worker_deaths=supervisors.deaths,
            worker_restarts=supervisors.restarts,
            resumed_at=0 if epoch is None else epoch.bookmark.delivered(),
            retries=0 if policy is None else policy.retries,
            batch_bytes=counters.bytes / max(1, counters.weighed),
            listed=Listed(shards, seconds) if shards else None,
            loop_lag=None if counters.lag is None else counters.lag(),
            device_bytes=counters.ahead_bytes() if is_under_way else 0,
            sources={name: SourceStats(*one) for name, one in self._mixed().items()},
            iteration=counters.iteration,
            _records=counters.recorded(),
            _setting=self._live.setting(),
            _copies=list(counters.copies),
            _alone=[*counters.alone],
        )

    def report(self, *, ranks: str | None = None) -> "Report":
        """Return the bottleneck of training, and the one argument to change.

        The report computes how fast the latest batches of the latest epoch, at most
        256, would be with other arguments, and advises the one with the largest
        speed-up. Takes 0.05 to 0.3 s. ``print`` shows it.

        From the first call on, even before the first epoch, a thread looks for code
        that blocks an event loop that reads samples.

        Args:
            ranks: Also says which rank waits longest for these batches, and which ranks
                have not called this in the same epoch. A name for this loader, the same
                on all ranks, such as ``"train"``. Numbers are exchanged through the
                store of torch's process group; no rank waits for another.
        """
        from aioloader._observe import verdict

        stats, length = self.stats(), self._epoch_length()
        self._live.ask()
        before = max(0, stats.epoch)
        setting = replace(stats._setting, length=length, epochs_before=before)
        found = verdict.report(stats._records, setting, stats, stats._copies)
        if ranks is None:
            return found
        from aioloader._base.rank_store import slowest_rank

        waited = sum(one.taken - one.asked for one in stats._records)
        slowest = slowest_rank(ranks, stats.epoch, waited, stats.recent)
        return replace(found, remarks=found.remarks + slowest)

    def report_html(self, path: str | os.PathLike[str]) -> None:
        """Write ``stats()`` and ``report()`` as one page, with a diagram of the stages.

        Args:
            path: The HTML file; it is self-contained and makes no requests.
        """
        from aioloader._observe.page import report_html

        report_html(path, self.stats(), self.report())

    def trace(self, path: str | os.PathLike[str]) -> "Trace":
        """Return a context manager that records when and where batches are made.

        Perfetto and Chrome's tracing open the file; ``aioloader.merge_traces`` joins it
        with a trace of ``torch.profiler``, which has the same clock. For ``with`` and
        ``async with``; a batch in the block costs 0.1 us.

        Args:
            path: The JSON file; compressed if the name ends with ``".gz"``.
        """
        from aioloader._observe.trace import Trace

        trace = Trace(path, self._live.traces)
        self._live.show(trace)
        return trace

    def _mixed(self) -> dict[str, tuple[int, float]]:
        """Return samples and passes of the sources of a mixture of streams."""
        epoch, options = self._live.epoch, self._live.options
        if epoch is None or options is None or not options.is_own_stream:
            return {}
        states = epoch.progress.bookmark().states.values()
        return mixed(one["dataset"] for one in states if "dataset" in one)

    def _epoch_length(self) -> int:
        """Return how many batches the latest epoch has; so far, if it has no length."""
        epoch, options = self._live.epoch, self._live.options
        if epoch is None or options is None:
            return 0
        batches = epoch.counters.batches
        if not epoch.progress.is_over:
            with contextlib.suppress(TypeError):
                batches = max(batches, options.length())
        return batches

    @property
    def skipped(self) -> tuple[Failure, ...]:
        """The latest failed samples of the latest epoch, at most 1,000."""
        policy = None if self._live.epoch is None else self._live.epoch.policy
        return () if policy is None else tuple(policy.latest)

    def __repr__(self) -> str:
        dataset = type(self.dataset).__name__
        return (
            f"DataLoader({dataset}, batch_size={self.batch_size}, "
            f"num_workers={self.num_workers}, epoch={self._epochs.next}, "
            f"open={len(self._live.open)})"
        )

    def __enter__(self) -> "DataLoader[Batch]":
        self._live.runners.keep()
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._live.runners.leave():
            self.close()

    async def __aenter__(self) -> "DataLoader[Batch]":
        self._live.runners.keep()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._live.runners.leave():
            await self.aclose()

    def close(self) -> None:
        """End all iterations and release what they hold; wait for it, bounded.

        All are dismissed first, then waited for; errors are raised afterwards. A loop
        of another thread or task ends as at the end of its epoch; ``state_dict`` tells
        where.
        """
        self._live.close()

    async def aclose(self) -> None:
        """End all iterations and release what they hold, without blocking the loop."""
        await self._live.aclose()
