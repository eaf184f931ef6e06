"""How a loader's arguments become one iteration: the maker, the workers, the place."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from aioloader._collate.collate import collates_as_torch, default_collate
from aioloader._collate.gather import gatherable
from aioloader._device.opening import Devices, DeviceSide
from aioloader._loader import arguments
from aioloader._loader.ahead import Ahead, is_foreseeable
from aioloader._loader.datapipes import draw_seed, seed_pipe
from aioloader._loader.dataset_states import note_first, snapshot_every
from aioloader._loader.state import Draft, Passage, own_state, resumed
from aioloader._loader.state_check import readers_of, reads_in_workers
from aioloader._observe.stats import Counters
from aioloader._order.failures import FailurePolicy
from aioloader._order.orders import IndexOrder, StreamOrder
from aioloader._order.progress import BEGINNING
from aioloader._order.ranks import Part
from aioloader._pipeline.batch_maker import BatchMaker, nothing_around
from aioloader._pipeline.batch_task import BatchTask
from aioloader._pipeline.epoch import Epoch, Settings, default_window
from aioloader._pipeline.hosts import Hosts
from aioloader._pipeline.inline import GatherIterator, InlineIterator
from aioloader._pipeline.pipeline_iterator import Patience, PipelineIterator
from aioloader._pipeline.plan import Plan
from aioloader._pipeline.roles import Pool
from aioloader._pipeline.turns import Turns
from aioloader._transport.slots import Locker, SlotPool
from aioloader._workers.info import be_at_sample
from aioloader._workers.lease import Lease, Pools
from aioloader._workers.process.fork_server import warm_fork_server
from aioloader._workers.process.pool import Tally
from aioloader._workers.process.server_launcher import Servers
from aioloader._workers.process.start import start_method, start_pool
from aioloader._workers.ray.workers import RayWorkers
from aioloader._workers.rng import BatchKeys, SampleKeys, seed_sample, swapped_in
from aioloader._workers.rng_streams import seed_batch
from aioloader._workers.threads import KeyedHere, ThreadWorkers
from aioloader._workers.worker_spec import WorkerSpec
from aioloader.protocols import Kind, is_async_function, is_own_stream, reads_async

if TYPE_CHECKING:
    from aioloader._loader.loader import DataLoader
    from aioloader._pipeline.iterator import BatchIterator


Source: TypeAlias = InlineIterator | GatherIterator | PipelineIterator


@dataclass(eq=False)
class Prepared:
    """One iteration, made and not begun.

    Attributes:
        source: Gives its batches.
        passage: Its pass over the dataset.
        counters: What the source counts.
        policy: What becomes of failed samples.
        epochs: How epochs were counted before it, and are when it is begun.
        loaded: The state that it resumes from, or None.
    """

    source: Source
    passage: Passage
    counters: Counters
    policy: FailurePolicy
    epochs: tuple[Any, Any] = (None, None)
    loaded: dict[str, Any] | None = None


class Runtime:
    """What a loader has in its own process, and is never copied."""

    def __init__(self, dataset: Any, loaded: dict[str, Any] | None = None) -> None:
        self.hosts = Hosts(dataset)
        self.slots = SlotPool()
        self.pools = Pools()
        self.devices = Devices()
        self.open: weakref.WeakSet[BatchIterator[Any]] = weakref.WeakSet()
        self.policy = FailurePolicy()
        self.counters = Counters()
        self.passage: Passage | None = None  # the latest
        self.loaded = loaded  # a state for the next iteration
        self.drafted: Callable[[], Draft | None] = _nothing
        # The pass of an iterator that holds workers, and was not asked for a batch yet.
        self.prepared: Callable[[], Passage | None] = _nothing
        self.servers = Servers()
        self.tally = Tally()
        self._base_seed: int | None = None  # of workers that persist
        self._ahead: Ahead[Prepared] | None = None
        self._guesses_wrong = False

    def draft(self, loader: "DataLoader[Any]") -> Draft:
        """Draw where torch draws: later draws must find the same generator."""
        order = loader._sampling.order({})
        seed_pipe(loader.dataset, loader.generator)
        if self._base_seed is None or not self.pools.has_kept():
            # Persistent workers keep theirs, as in torch.
            drawn = torch.empty((), dtype=torch.int64).random_(
                generator=loader.generator
            )
            self._base_seed = int(drawn.item())
            if loader.num_workers:  # torch begins a sampler a second time for workers
                order = loader._sampling.order({})
                draw_seed(loader.dataset, loader.generator)
        draft = Draft(self._base_seed, order, own_state(loader))
        # It lives as long as the iterator that has not begun.
        self.drafted = weakref.ref(draft)
        return draft

    def start(
        self,
        loader: "DataLoader[Any]",
        draft: Draft | None,
        *,
        is_async: bool,
    ) -> Source:
        """Make the source of one iteration, when its first batch is asked for.

        Args:
            loader: Whose arguments count.
            draft: What was drawn for it; None if a state had been loaded.
            is_async: Whether the consumer is a task.
        """
        return self.commit(loader, self.prepare(loader, draft, is_async=is_async))

    def prepare(
        self, loader: "DataLoader[Any]", draft: Draft | None, *, is_async: bool
    ) -> "Prepared":
        """Make the source of one iteration; it counts as begun with ``commit``."""
        before = loader._epochs.state()
        try:
            prepared = self._claim_ahead() if self.loaded is None else None
            if prepared is None:
                passage = self._passage(loader, draft)
                prepared = self.begin(loader, passage, is_async=is_async)
            else:
                note_first(loader, prepared.passage, self.passage)
            order = loader._epochs.state()
        finally:
            loader._epochs.restore(before)  # it is not begun, and may be tried again
        prepared.epochs, prepared.loaded = (before, order), self.loaded
        self.prepared = weakref.ref(prepared.passage)
        return prepared

    def commit(self, loader: "DataLoader[Any]", prepared: "Prepared") -> Source:
        """Begin the iteration that was prepared."""
        before, after = prepared.epochs
        if loader._epochs.state() == before:  # nobody has chosen another meanwhile
            loader._epochs.restore(after)
        self.passage, self.policy = prepared.passage, prepared.policy
        self.counters, self.prepared = prepared.counters, _nothing
        if self.loaded is prepared.loaded:  # none was loaded meanwhile
            self.loaded = None
        return prepared.source

    def _passage(self, loader: "DataLoader[Any]", draft: Draft | None) -> Passage:
        """Return the pass that is to begin, or to go on."""
        saved = self.loaded
        if saved is None and self.passage is not None and self.passage.is_untouched():
            saved = self.passage.saved  # nothing came of it
        if saved is not None:
            self.pools.drop()  # as torchdata's, workers begin from the state
            passage = resumed(loader, saved, self.draft)
            self._base_seed = passage.base_seed
            return passage
        draft = draft or self.draft(loader)
        epoch = loader._epochs.begin()
        passage = Passage.begun(epoch, draft, BEGINNING, readers_of(loader))
        note_first(loader, passage, self.passage)
        return passage

    def begin(
        self, loader: "DataLoader[Any]", passage: Passage, *, is_async: bool
    ) -> "Prepared":
        """Make the source of one pass over the dataset."""
        counters = Counters(epoch=passage.epoch)
        policy = FailurePolicy(loader.on_error, loader.max_failures)
        tensors = _gathered(loader)
        if tensors is not None and isinstance(passage.order, IndexOrder):
            chunks = passage.order.chunks(passage.bookmark.done)
            gather = GatherIterator(tensors, _plan(loader, passage, chunks), counters)
            return Prepared(gather, passage, counters, policy)
        self.hosts.lifespan = loader.lifespan
        maker = _maker(loader, self, passage, policy)
        side = _device_side(loader, self.devices)
        settings = _settings(loader, side, is_async=is_async)
        locker = self.slots.locker = side.locker if side else None
        pool = _pool(loader, self, maker, passage, locker)
        make_stage = partial(side.stage, epoch=passage.epoch) if side else None
        bookmark = passage.bookmark
        batches = passage.order.batches(bookmark.done, bookmark.states.get(0))
        turns = None
        if readers_of(loader) > 1 and not loader.in_order:
            turns = Turns(readers_of(loader), bookmark.done)
            assert isinstance(passage.order, StreamOrder)
            batches = passage.order.batches_of(turns)
        plan = _plan(loader, passage, batches, turns)
        source = Epoch(maker, plan, counters, settings).start(
            self.hosts, pool, make_stage
        )
        if isinstance(
            source, PipelineIterator
        ):  # reads ahead: what it has read is no sign
            passage.reads_ahead = True
        if isinstance(source, PipelineIterator) and self._may_look_ahead(loader):
            # A source does not keep the loader, of which it may be a part.
            source.when_exhausted = partial(_look_ahead, weakref.ref(loader))
        return Prepared(source, passage, counters, policy)

    # -- the next epoch of persistent workers -------------------------------------

    def _claim_ahead(self) -> "Prepared | None":
        """Return the epoch that was begun ahead, if it is the one that is wanted."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        if not ahead.claim():
            self._guesses_wrong = True  # it would be wrong again
            return None
        return ahead.prepared

    def look_ahead(self, loader: "DataLoader[Any]") -> None:
        """Have persistent workers make one batch more of the next epoch."""
        if self._ahead is not None:
            self._ahead.issue()
            return

        def make(epoch: int) -> Prepared:
            order, seed = loader._sampling.order({}), self._base_seed or 0
            draft = Draft(seed, order, own_state(loader))
            passage = Passage.begun(epoch, draft, BEGINNING, readers_of(loader))
            return self.begin(loader, passage, is_async=False)

        sampler = loader._sampling.index_sampler
        self._ahead = Ahead(sampler, loader._epochs, make)

    def forget_ahead(self) -> None:
        """Drop the epoch that was begun ahead, if one was."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.dismiss()

    def _may_look_ahead(self, loader: "DataLoader[Any]") -> bool:
        is_kept = loader.persistent_workers and loader.workers == "process"
        return (
            is_kept
            and not self._guesses_wrong
            and reads_in_workers(loader)
            and is_foreseeable(loader._sampling.index_sampler, loader.batch_sampler)
        )


def _look_ahead(reference: "weakref.ref[DataLoader[Any]]") -> None:
    loader = reference()
    if loader is not None:
        loader._live.look_ahead(loader)


def _device_side(loader: "DataLoader[Any]", devices: Devices) -> DeviceSide | None:
    """Return what moves batches behind the pipeline, or None if nothing does.

    Without workers, batches are pinned where they are collated, as in torch.
    """
    if loader.device is None and not (loader.num_workers and _pins(loader)):
        return None
    return devices.open(loader.device, loader.prefetch_device)


def _nothing() -> None:
    """Stand for a reference to nothing."""


def _pins(loader: "DataLoader[Any]") -> bool:
    return loader.device is None and arguments.can_pin(
        pin_memory=loader.pin_memory, pin_memory_device=loader.pin_memory_device
    )


def _settings(
    loader: "DataLoader[Any]", side: DeviceSide | None, *, is_async: bool
) -> Settings:
    patience = Patience(
        float(loader.timeout) if 0 < loader.timeout < threading.TIMEOUT_MAX else None,
        restarts=loader.on_timeout == "restart",
    )
    return Settings(
        is_async=is_async,
        loop=loader.loop,
        concurrency=loader.concurrency,
        prefetch_factor=loader.prefetch_factor,
        patience=patience,
        in_order=loader.in_order,
        drop_last=loader.drop_last,
        num_workers=loader.num_workers,
        prefetch_device=side.depth if side else 0,
    )


def _plan(
    loader: "DataLoader[Any]",
    passage: Passage,
    batches: Any,
    turns: Turns | None = None,
) -> Plan:
    is_stream = loader._kind is not Kind.MAP
    return Plan(batches, passage.progress, passage.bookmark, is_stream, turns)


def _gathered(loader: "DataLoader[Any]") -> tuple[torch.Tensor, ...] | None:
    """Return the tensors of a dataset whose batches can be gathered by index."""
    is_plain = loader.collate_fn is default_collate and collates_as_torch()
    is_plain = is_plain and not loader.num_workers and not loader._sampling.part.masks()
    is_moved = loader.pin_memory or loader.device is not None
    is_more = loader.transform is not None or loader.lifespan is not None
    if not is_plain or is_more or is_moved:
        return None
    return gatherable(loader.dataset)


def _dealt(loader: "DataLoader[Any]") -> Any:
    """Return the dataset; of a stream, which knows of ranks, this rank's part."""
    sampling = loader._sampling
    if sampling.is_ranked and is_own_stream(loader.dataset):
        return loader.dataset.shard(sampling.part.rank, sampling.part.world_size)
    return loader.dataset


def _maker(
    loader: "DataLoader[Any]", live: Runtime, passage: Passage, policy: FailurePolicy
) -> BatchMaker:
    collate_fn = loader.collate_fn
    pins = not loader.num_workers and _pins(loader)
    make_keys = SampleKeys if loader.rng == "sample" else BatchKeys
    is_keyed = arguments.draws_by_key(loader.rng, loader.num_workers)
    keys = make_keys(passage.base_seed, passage.epoch, loader._sampling.part)
    return BatchMaker(
        _dealt(loader),
        loader.transform,
        arguments.pinning(collate_fn) if pins else collate_fn,
        batched=loader._auto_collation,
        policy=policy,
        epoch=passage.epoch,
        retry=loader.retry,
        pool=live.slots,
        around=_around(loader) if is_keyed else nothing_around,
        reseed=seed_batch if is_keyed and not loader.num_workers else None,
        seed=be_at_sample if loader.num_workers else seed_sample,
        keys=keys if is_keyed else None,
        part=_part_of_stream(loader),
        snapshot_every=snapshot_every(loader),
        keeps_step=loader._sampling.part.world_size > 1,
    )


def _part_of_stream(loader: "DataLoader[Any]") -> Part:
    """Return the part that is taken of an iterable: all of one that knows of ranks."""
    part = loader._sampling.part
    if is_own_stream(loader.dataset):
        part = replace(part, rank=0, world_size=1)
    return part


def _around(loader: "DataLoader[Any]") -> Callable[[BatchTask], Any]:
    """Return how plain code in this process gets the generators of its batch."""
    if not loader.num_workers:
        return lambda task: swapped_in(task.key or 0)
    is_here = loader.workers == "thread" or isinstance(loader.workers, Executor)
    return KeyedHere if is_here else nothing_around


def _pool(
    loader: "DataLoader[Any]",
    live: Runtime,
    maker: BatchMaker,
    passage: Passage,
    locker: Locker | None,
) -> Pool | None:
    """Return what makes the batches, or None if that is done here."""
    if not loader.num_workers:
        return None
    reads = reads_in_workers(loader)
    if not reads and maker.collates_async:
        return None  # nothing is left that is not for the loop
    base_seed = passage.base_seed
    spec = _spec(loader, maker, passage, reads=reads)
    if isinstance(loader.workers, Executor):
        from aioloader._workers.executors import ExecutorWorkers

        return ExecutorWorkers(loader.workers, spec)
    if loader.workers == "thread":
        return ThreadWorkers(
            loader.num_workers,
            reads=reads,
            init=loader.worker_init_fn,
            base_seed=base_seed,
        )
    if isinstance(loader.workers, RayWorkers):
        from aioloader._workers.ray.pool import lease_actors

        keep = loader.persistent_workers
        return lease_actors(live.pools, loader.workers, spec, keep=keep)
    start = partial(
        start_pool, spec, method_of(loader), live.servers, locker, live.tally
    )
    keep = loader.persistent_workers
    return Lease(live.pools, start, reads=reads, keep=keep, pumps=True)


def method_of(loader: "DataLoader[Any]") -> str:
    """Return how the worker processes of ``loader`` start."""
    context, dataset = loader.multiprocessing_context, loader.dataset
    is_async = loader._kind is Kind.ASYNC_ITERABLE or (
        loader._kind is Kind.MAP and reads_async(dataset)
    )
    functions = loader.transform, loader.collate_fn
    is_plain = not (is_async or any(map(is_async_function, functions)))
    return start_method(context, is_plain=is_plain)


def warm_workers(loader: "DataLoader[Any]") -> None:
    """Begin to start what ``loader``'s worker processes come from, if it takes long."""
    is_process = loader.num_workers > 0 and loader.workers == "process"
    if is_process and method_of(loader) == "forkserver":
        warm_fork_server()


def starts_at_iter(loader: "DataLoader[Any]", *, is_async: bool) -> bool:
    """Tell whether an iterator holds worker processes from the beginning, as torch's.

    To fork is nothing that could be done later, or in another thread. The rest would
    hold up the event loop of an async consumer.
    """
    is_process = loader.num_workers > 0 and loader.workers == "process"
    return is_process and (not is_async or method_of(loader) == "fork")


def _spec(
    loader: "DataLoader[Any]", maker: BatchMaker, passage: Passage, *, reads: bool
) -> WorkerSpec:
    """Return what workers are told."""
    transform = loader.transform
    if not reads and is_async_function(transform):
        transform = None  # it is done where samples are read
    per_worker = loader.prefetch_factor or (
        2
        if not reads or maker.is_plain()
        else default_window(loader.concurrency, loader.batch_size or 1)
    )
    return WorkerSpec(
        dataset=maker.dataset if reads else None,
        transform=transform,
        collate_fn=loader.collate_fn,
        batched=loader._auto_collation,
        retry=loader.retry,
        on_error=loader.on_error,
        drop_last=loader.drop_last,
        reads=reads,
        worker_init_fn=loader.worker_init_fn,
        num_workers=loader.num_workers,
        base_seed=passage.base_seed,
        rng=loader.rng or "batch",
        concurrency=loader.concurrency,
        window=per_worker,
        in_flight=per_worker * loader.num_workers,
        part=maker.part,
        snapshot_every=maker.snapshot_every,
        keeps_step=maker.keeps_step,
        lifespan=loader.lifespan if reads else None,
        datasets=passage.bookmark.datasets,
    )
