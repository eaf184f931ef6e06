"""The public ``DataLoader`` class, which accepts torch's arguments and more.

It checks its arguments, and leaves reading and scheduling to other modules.
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
    apply_shuffle,
    check_batches,
    copy_keyed_order,
    current_part,
    end_rounds,
    given_part,
    make_samplers,
    repeats_samples,
    set_epochs,
    warn_of_repeats,
)
from aioloader._loader.state import State, unsealed
from aioloader._loader.torch_compat import Batch, TorchLoader, dataset_kind
from aioloader._order.epoch import EpochNumbers, index_sampler_of
from aioloader._order.ranks import WHOLE, Tail
from aioloader._order.stream_states import mixture_counts
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


class _Overridable:
    """A computed attribute that instances can overwrite, unlike a property."""

    def __init__(self, get: Callable[[Any], int]) -> None:
        self._get = get

    def __get__(self, loader: Any, _cls: type) -> int:
        if loader is None:  # only instances have it
            raise AttributeError
        return self._get(loader)


class DataLoader(TorchLoader[Batch]):
    """Load batches from a dataset, for ``async for`` and for ``for``.

    A drop-in replacement for ``torch.utils.data.DataLoader``: the first 17 arguments,
    the order and the batches are the same; random numbers in workers follow ``rng``.
    Coroutine functions (``async __getitem__``, ``__aiter__``, an async ``transform``)
    run on an event loop, ``concurrency`` samples at a time and across batch boundaries.
    Plain functions run off the loop.

    Example:
        >>> loader = DataLoader(list(range(6)), batch_size=4)
        >>> [batch.tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5]]

    Attributes:
        epoch: Number of the current epoch, from 0; between epochs, of the next one.
            ``state_dict()`` saves it.

    Args:
        dataset: Map-style, iterable or async iterable; no base class is needed.
        batch_size: Samples per batch; ``None`` delivers single samples.
        shuffle: Visit a map-style dataset in a new random order each epoch.
        sampler: Yields indices; excludes ``shuffle``.
        batch_sampler: Yields lists of indices; excludes ``batch_size``, ``shuffle``,
            ``sampler`` and ``drop_last``.
        num_workers: Worker processes (or threads) that make batches. ``"auto"``: none
            for a ``TensorDataset`` or if all code is async, otherwise one per core (at
            most 8) in the first epoch, then adjusted between epochs while that helps
            (not with ``persistent_workers``); refused if samples, random numbers or
            states would depend on the number. On free-threaded Python, ``"auto"`` uses
            threads for a plain map-style dataset, which they share.
        collate_fn: Turns a list of samples into a batch; may be async.
        pin_memory: Copy batches into page-locked memory.
        drop_last: Drop a short last batch.
        timeout: Seconds to wait for a batch after its request; 0: no limit.
        worker_init_fn: Called in each worker with its number.
        multiprocessing_context: Start method of workers.
        generator: Source of the shuffle order and of ``base_seed``.
        prefetch_factor: Limit on batches in flight (requested, not yet delivered) per
            worker, or in total without workers (an error in torch). ``None``: depends
            on the dataset, see "Defaults" in the guide to workers. ``"auto"``: starts
            there, and grows while that helps.
        persistent_workers: Keep workers between epochs.
        pin_memory_device: Deprecated, as in torch.
        in_order: Deliver batches in the sampler's order; otherwise as they complete.
        snapshot_every_n_steps: Accepted for compatibility with torchdata, but unused:
            the loader takes the state of a dataset or iterator after each batch.
        transform: Applied to each sample before collating; may be async.
        concurrency: Samples in flight on an event loop, and threads that
            ``asyncio.to_thread`` may use on the loader's own loop. ``"auto"``: 32 at
            first, then as many as help, up to 1,024; in workers that read, 64. The
            logger ``"aioloader"`` logs what ``"auto"`` changes, and why.
        device: Device of the delivered batches, such as ``"cuda:1"``, a local rank, a
            ``DeviceMesh`` of one dimension (this rank's device), or ``"auto"`` (the
            accelerator, if any). Batches are copied in advance on a side stream,
            without blocking your thread. A ``Device`` also sets how many batches to
            copy in advance, which entries, and a transform to run on the device.
        workers: ``"process"``, ``"thread"`` (for code that releases the GIL), a
            ``concurrent.futures.Executor``, or ``RayWorkers``.
        fetch: Where samples are read: ``"workers"``, ``"loader"`` (workers transform
            and collate), or ``"auto"``: workers if they can. Processes can read all
            but async iterables; other workers read only map-style datasets.
        rng: What seeds random numbers: the ``"batch"`` (the default with workers), the
            ``"sample"``'s position in the epoch, or the ``"worker"``, as in torch.
            Without workers, the global generators' state is restored after each batch.
        on_timeout: ``"raise"``, or ``"restart"`` the worker that delays the batch.
        loop: ``"thread"``: the loader's own loop in a private thread, which keeps
            running while the consumer computes; ``"caller"``: the loop that iterates.
        on_error: ``"raise"``; ``"skip"`` a failed sample (its batch is smaller); a
            callable that maps a ``Failure`` to a replacement or ``SKIP``; or a
            ``Skip``, which limits how many may fail in an epoch.
        retry: When and how often to retry a failed read.
        rank: Which of the ``world_size`` parts of each global batch to deliver.
            ``"auto"``: from ``torch.distributed``, else from RANK and WORLD_SIZE, when
            iteration starts. A ``DeviceMesh`` of one dimension, such as ``mesh["dp"]``:
            ranks that differ only in other dimensions deliver the same batches. By
            default every rank gets all samples, as in torch.
        world_size: Number of ranks.
        tail: How to handle a last global batch that cannot be split evenly. ``"wrap"``
            (the default): fill it with samples from the beginning, as in torch;
            ``"pad"``: the same, and each batch is a pair ``(batch, mask)``; ``"drop"``;
            or ``"uneven"``. Streams of unknown length have no default.
        lifespan: Returns a context manager, plain or async, for the dataset: entered
            where samples are read (once in this process, or in each worker process).
        prefetch_bytes: Limit on the bytes of batches in flight, estimated from the
            largest recent batch; one batch is always requested.

    Raises:
        ValueError: If a value is invalid, or arguments exclude each other.
        TypeError: If an argument is of the wrong type.
    """

    dataset: Any
    batch_size: int | None
    sampler: Any
    batch_sampler: Any
    collate_fn: Any
    prefetch_factor: int | None
    _live: Runtime
    epoch: _Overridable = _Overridable(lambda loader: loader._live.epoch_number())

    # Overloads for the type of a batch, see `signature`. The first match wins.
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
            arguments.refuse_unknown(unknown)
        if shuffle is not None:
            dataset, shuffle = apply_shuffle(dataset, shuffle)
        num_workers = arguments.count_workers(num_workers, workers)
        prefetch_factor = auto_number("prefetch_factor", prefetch_factor)
        concurrency = auto_number("concurrency", concurrency)
        if device is not None:
            device = found_here(device)
        arguments.check_each(locals())
        self._keep_arguments(locals())
        options = Options(attributes_of(self), WHOLE)
        arguments.check_together(options, shuffle)
        if options.chooses:
            auto.begin(self, options)
        if multiprocessing_context is not None:
            context = multiprocessing_context, self.num_workers, workers
            self.multiprocessing_context = arguments.context_of(*context)
        given = self._given_part = given_part(rank, world_size, tail, dataset)
        if given is not None and given.has_peers:  # ``rank`` is a mesh
            self._replace("rank", given.rank)
            self._replace("world_size", given.world_size)
        self._may_repeat = repeats_samples(options, shuffle)
        made = make_samplers(options, given, shuffle)
        self.sampler, self.batch_sampler, self.batch_size = made
        if collate_fn is None:
            name = "default_collate" if self._auto_collation else "default_convert"
            default = getattr(torch_rules, name)  # a program may have replaced it
            collate_fn = OURS.get(default, default)
        self.collate_fn = collate_fn
        self._dataset_kind = dataset_kind(dataset, options.kind)
        self._IterableDataset_len_called = None
        if self._has_own_order:
            torch_compat.refuse_keyed(self)
        self._epochs = EpochNumbers(index_sampler_of(self.sampler, self.batch_sampler))
        self._live = Runtime(dataset, self._epochs)
        # These arguments are checked; an iteration checks again only if one changes.
        options = self._live.options = Options(attributes_of(self), WHOLE)
        if self.num_workers:
            self._live.warm(options)
        self.__initialized = True  # ``__setattr__`` guards attributes from here on

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_live": self._live.loaded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = copy_keyed_order(state["sampler"], state["batch_sampler"])
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

    def _options(self, *, fixes_ranks: bool = False) -> Options:
        """Return the current options; ``fixes_ranks`` looks up and stores the rank."""
        live = self._live
        part = (None if fixes_ranks else live.part) or current_part(self)
        if fixes_ranks:
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
        """Return the number of batches per epoch, or raise a TypeError if unknown."""
        options = self._options()
        length = options.length(current_part(self))
        if options.kind is not Kind.MAP and not options.is_own_stream:
            self._IterableDataset_len_called = len(self.dataset)  # type: ignore[assignment]
        return length

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, also in the samplers and the dataset.

        Persistent workers also set it in their copies of the dataset.
        """
        loaded = self._live.loaded
        if loaded is not None and loaded.epoch != epoch:
            self._live.loaded = None  # the requested epoch starts at its beginning
        self._epochs.choose(epoch)
        set_epochs((self.sampler, self.batch_sampler), self.dataset, epoch)

    def _iterate(self, *, is_async: bool) -> BatchIterator[Batch]:
        """Return a new iterator; worker processes may start now, as in torch."""
        live = self._live
        refuse_again(self.dataset, is_begun=live.epoch is not None)
        options = self._options(fixes_ranks=True)
        if options.chooses:
            auto.settle(self)
            options = self._options()
        refuse_again(options.dataset, is_begun=False, readers=options.readers)
        if options.is_own_stream:
            end_rounds(options)  # checks that ranks can agree on the end
            check_batches(options)
        epoch, seed = None, None if live.loaded is None else live.loaded.seed
        if seed is None:
            epoch = live.draw(options, live.loaded)
            seed = epoch.base_seed
        # Otherwise the first step starts the epoch; an unused iterator starts none.
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
        live.open_iterators[iterator] = None
        if steps.prepared is not None:
            steps.prepared.open(requests=not is_async)
        return iterator

    def state_dict(self) -> State:
        """Return the loader's state after the last delivered batch.

        This takes microseconds, and works at any time and from any thread. The state is
        small, and ready for JSON if the states of your dataset and sampler are.
        """
        return self._live.state_dict(self._options)

    def load_state_dict(self, state: State, *, strict: bool = True) -> None:
        """Make the next iteration resume from a saved state; ignore an empty state.

        An iterable that has no ``state_dict`` is read again up to the saved position.

        Args:
            state: The state that ``state_dict`` returned.
            strict: Whether shards must have the same times or ETags as at the save.
                If False, these may differ, so copies of the shards are accepted.

        Raises:
            StateMismatchError: If the state does not fit this loader.
        """
        if state == {}:
            return
        loaded, options = unsealed(state), self._options(fixes_ranks=True)
        self._live.load_state_dict(options, loaded, strict=strict)

    def stats(self) -> "LoaderStats":
        """Return the statistics of the latest epoch so far; ``print`` shows a table."""
        from aioloader._observe.stats import Listed, LoaderStats, SourceStats

        epoch, supervisors = self._live.epoch, self._live.pools.supervisors
        counters = Counters() if epoch is None else epoch.counters
        policy = None if epoch is None else epoch.policy
        is_under_way = any(each.is_under_way() for each in self._live.iterators())
        shards, seconds = counters.listed_shards, counters.listed_seconds
        sources = self._source_counts()
        return LoaderStats(
            epoch=counters.epoch,
            batches=counters.batches,
            waited=counters.waited,
            in_flight=counters.in_flight if is_under_way else 0,
            failures=0 if policy is None else policy.count,
            worker_deaths=supervisors.deaths,
            worker_restarts=supervisors.restarts,
            resumed_at=0 if epoch is None else epoch.start.delivered(),
            retries=0 if policy is None else policy.retries,
            batch_bytes=counters.bytes / max(1, counters.weighed),
            listed=Listed(shards, seconds) if shards else None,
            loop_lag=None if counters.lag is None else counters.lag(),
            device_bytes=counters.ahead_bytes() if is_under_way else 0,
            sources={name: SourceStats(*counts) for name, counts in sources.items()},
            iteration=counters.iteration,
            _records=counters.recorded(),
            _setting=self._live.settings(),
            _copies=list(counters.copies),
            _alone=[*counters.alone],
        )

    def report(self, *, ranks: str | None = None) -> "Report":
        """Return the bottleneck of training, and the one argument to change.

        The report computes how fast the latest batches of the latest epoch (at most
        256) would be with other arguments. It recommends the cheapest change that is
        almost as fast as the best. Takes 0.05 to 0.3 s. ``print`` shows the report.

        After the first call, even before the first epoch, a thread looks for code that
        blocks an event loop on which samples are read.

        Args:
            ranks: A name for this loader, the same on all ranks, such as ``"train"``.
                The report then also names the rank that waits longest for batches, and
                ranks that have not called ``report`` in this epoch. Ranks exchange data
                through the store of torch's process group, without waiting.
        """
        from aioloader._observe import verdict

        stats, length = self.stats(), self._epoch_length()
        self._live.watch_blocking()
        before = max(0, stats.epoch)
        setting = replace(stats._setting, length=length, epochs_before=before)
        report = verdict.report(stats._records, setting, stats, stats._copies)
        if ranks is None:
            return report
        from aioloader._base.rank_store import slowest_rank

        waited = sum(record.taken - record.asked for record in stats._records)
        slowest = slowest_rank(ranks, stats.epoch, waited, stats.recent)
        return replace(report, remarks=report.remarks + slowest)

    def report_html(self, path: str | os.PathLike[str]) -> None:
        """Write ``stats()`` and ``report()`` to one page with a diagram of the stages.

        Args:
            path: The HTML file; it is self-contained and makes no requests.
        """
        from aioloader._observe.page import report_html

        report_html(path, self.stats(), self.report())

    def trace(self, path: str | os.PathLike[str]) -> "Trace":
        """Return a context manager that records when and where batches are made.

        Open the file in Perfetto or Chrome's tracing; ``aioloader.merge_traces`` merges
        it with a trace of ``torch.profiler``, which has the same clock. Use the result
        in ``with`` or ``async with``. Tracing costs 0.1 us per batch.

        Args:
            path: The JSON file; compressed if the name ends with ``".gz"``.
        """
        from aioloader._observe.trace import Trace

        trace = Trace(path, self._live.traces)
        self._live.follow(trace)
        return trace

    def _source_counts(self) -> dict[str, tuple[int, float]]:
        """Return sample counts and mean pass numbers of a mixture's sources, if any."""
        epoch, options = self._live.epoch, self._live.options
        if epoch is None or options is None or not options.is_own_stream:
            return {}
        states = epoch.progress.position().states.values()
        return mixture_counts(s["dataset"] for s in states if "dataset" in s)

    def _epoch_length(self) -> int:
        """Return the latest epoch's batch count, or the count so far if unknown."""
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
        """The latest failed samples (at most 1,000) of the latest epoch."""
        policy = None if self._live.epoch is None else self._live.epoch.policy
        return () if policy is None else tuple(policy.latest)

    def __repr__(self) -> str:
        dataset = type(self.dataset).__name__
        return (
            f"DataLoader({dataset}, batch_size={self.batch_size}, "
            f"num_workers={self.num_workers}, epoch={self._epochs.next}, "
            f"open={len(self._live.open_iterators)})"
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
        """End all iterations and release their resources, within a limited time.

        A loop in another thread or task ends as if the epoch were over; ``state_dict``
        returns its position. Errors are raised once all iterations have ended.
        """
        self._live.close()

    async def aclose(self) -> None:
        """End all iterations and release their resources, without blocking the loop."""
        await self._live.aclose()
