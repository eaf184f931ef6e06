"""Build an epoch's feed with its runner, worker pool, queue, device stage and tuner."""

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch.utils.data._utils import pin_memory as torch_pin

from aioloader._base.failures import FailurePolicy
from aioloader._base.records import Pace, RecordedSettings
from aioloader._base.waiting import running_loop
from aioloader._loader.options import FIRST_VALUES, Auto, Options
from aioloader._loader.sampling import end_rounds
from aioloader._order.epoch import Epoch, EpochNumbers
from aioloader._order.indices import IndexOrder, Order
from aioloader._pipeline.ahead_feed import AheadFeed, refuse_blocking
from aioloader._pipeline.awaiting import SideLoop
from aioloader._pipeline.batch_maker import BatchMaker
from aioloader._pipeline.batch_task import BatchTask, Window
from aioloader._pipeline.lasting_pool import LastingPool, PoolHandle
from aioloader._pipeline.pipeline import Pipeline, Pool
from aioloader._pipeline.plain import Feed
from aioloader._pipeline.position import StateLoads
from aioloader._pipeline.ready import ReadyQueue
from aioloader._pipeline.runner import RunnerPlace, Runners
from aioloader._transport.slots import SlotPool
from aioloader._workers.info import use_batch_rng, use_sample_rng
from aioloader._workers.ray.workers import RayWorkers
from aioloader._workers.rng import keys_of, seed_batch, seed_sample, swapped_for
from aioloader.protocols import Kind, batch_getter, is_async_function

if TYPE_CHECKING:
    import torch

    from aioloader._device.accelerator import Accelerator
    from aioloader._device.mover import Mover
    from aioloader._pipeline.tuner import Tuner, Tuning
    from aioloader._workers.idle import Pools
    from aioloader._workers.worker_spec import WorkerSpec

# Limits of "auto": samples in flight; batches in flight in total, or per worker.
_MAX_CONCURRENCY, _MAX_PREFETCH, _MAX_PREFETCH_PER_WORKER = 1024, 32, 8


class LoaderResources(Protocol):
    """The attributes of ``Runtime`` that feeds use; their values outlive epochs."""

    accelerators: "dict[torch.device, Accelerator]"
    loads: StateLoads
    numbers: EpochNumbers
    pace: Pace
    slots: SlotPool

    @property
    def runners(self) -> Runners: ...
    @property
    def pools(self) -> "Pools": ...
    @property
    def tuning(self) -> "Tuning": ...


def make_source(
    options: Options, epoch: Epoch, live: LoaderResources, *, is_async: bool
) -> Feed:
    """Return the feed that makes the batches of ``epoch``."""
    start, saved = epoch.start, epoch.saved
    live.loads.keeps_generator = False
    if isinstance(epoch.order, IndexOrder) and (tensors := options.gathered):
        from aioloader._pipeline.inline import GatherFeed

        return GatherFeed(tensors, epoch)
    runners = live.runners
    runners.lifespan = options.lifespan
    maker = make_maker(options, epoch, live)
    if is_async and options.loop == "caller":
        maker.side_loop = SideLoop(running_loop())
    if options.is_inline and not is_async:
        from aioloader._pipeline.inline import InlineFeed

        has_read = saved is not None and start.delivered() > 0
        live.loads.keeps_generator = has_read and "default" in saved.generators
        runner = runners.lease("inline") if options.lifespan else None
        return InlineFeed(epoch, maker, runner)
    ready, make_feed = _queue(options, epoch, maker)
    mover, stage, on_device = _mover(options, live), None, 0
    if mover is not None:
        from aioloader._device.stage import Staged

        on_device = options.target.ahead
        stage = Staged(ready, mover, on_device, epoch.counters)
    reads, place = options.pool_reads, _place(options, is_async=is_async)
    window = _window(options, epoch.order, on_device=on_device, is_async=is_async)
    is_tuned = options.chooses or options.prefetch_bytes is not None
    tuner = _tuner(options, live.tuning, reads_here=not reads) if is_tuned else None
    epoch.counters.describe = partial(
        _recorded_settings, options, window, reads=reads, on_device=on_device
    )
    epoch.reads_ahead = True  # more samples may be read than were delivered
    if start.datasets and not options.has_copies:
        maker.initial_states = [*start.datasets.values()]
    pool = _pool(options, epoch, maker, live)
    runner = runners.lease(place)
    release: Callable[[], object] = runner.release
    try:
        pipeline = Pipeline(
            maker,
            runner,
            ready=ready,
            start=start,
            pool=pool,
            head_start=options.follows_concurrency,
            tuner=tuner,
            pace=live.pace,
            counters=epoch.counters,
        )
        release, pipeline.stage = pipeline.dismiss, stage
        return make_feed(
            pipeline,
            epoch,
            window,
            timeout=options.patience,
            restarts=options.on_timeout == "restart",
        )
    except BaseException:  # such as Ctrl-C
        release()
        raise


def _queue(
    options: Options, epoch: Epoch, maker: BatchMaker
) -> tuple[ReadyQueue, type[AheadFeed]]:
    """Return the queue of an epoch's batches, and the class of its feed."""
    start, dropped, in_order = epoch.start, epoch.dropped, options.in_order
    if options.is_own_stream:
        rounds = end_rounds(options, epoch.number, start.delivered(), maker.dataset)
        if rounds is not None:  # all ranks must end together
            from aioloader._pipeline.evened import EvenedFeed, EvenedQueue

            queue = EvenedQueue(
                rounds,
                dropped,
                options.readers,
                pads=options.tail != "drop",
                in_order=in_order,
                start=start.done,
            )
            return queue, EvenedFeed
    without = start.beyond - dropped
    return ReadyQueue(in_order=in_order, start=start.done, without=without), AheadFeed


def _place(options: Options, *, is_async: bool) -> RunnerPlace:
    """Return the place of the runner in this process, such as a thread or a loop."""
    is_here = options.workers == "thread" or isinstance(options.workers, Executor)
    if options.pool_reads and not is_here:
        return "pool"
    if options.is_plain or options.pool_reads:
        return "thread"
    if options.loop == "thread":
        return "loop"
    if not is_async:
        refuse_blocking()
    return asyncio.get_running_loop()


def _window(
    options: Options, order: Order, *, on_device: int, is_async: bool
) -> Window:
    """Return the limits on batches and samples in flight."""
    if options.is_keyed and not options.num_workers:
        # Making a batch replaces the state of the user's global generators for a while,
        # so no batch is made before the user requests it.
        return Window(1, is_lazy=True)
    readers, reads = max(1, options.num_workers), options.pool_reads
    factor = options.prefetch_factor
    if factor is not None and not isinstance(factor, Auto):
        return Window(readers * factor + on_device)
    if options.is_plain:
        hops = options.has_processes if reads else is_async and reads is None
        if isinstance(order, IndexOrder):
            draws = order.draws is not None and order.draws.draws_at_end
        else:
            draws = bool(reads) and options.kind is Kind.MAP
        window = readers * (factor or 2) + on_device
        # A user's sampler or generator is drawn from as far ahead as torch does.
        return Window(window, runs=hops and not (on_device or draws))
    # Spare batches: one is being collated, one delivered, and one is late.
    spare = (factor or 3) * readers + on_device
    is_beside = reads is None and not on_device and options.loop == "thread"
    return Window(
        spare,
        samples=options.concurrency * readers,
        runs=is_beside and options.kind is Kind.ASYNC_ITERABLE,
    )


def _tuner(options: Options, tuning: "Tuning", *, reads_here: bool) -> "Tuner":
    from aioloader._pipeline.tuner import Tuner

    limits: dict[str, tuple[int, int, int]] = {}
    given = int(options.prefetch_factor or 2)
    size = options.global_batch_size or 1
    if isinstance(options.concurrency, Auto) and reads_here and options.reads_async:
        limits["concurrency"] = options.concurrency, 1, _MAX_CONCURRENCY
    if isinstance(options.prefetch_factor, Auto):
        most = _MAX_PREFETCH_PER_WORKER if options.num_workers else _MAX_PREFETCH
        limits["prefetch_factor"] = given, min(given, 2), most
    control = {name: tuning.controller(name, *each) for name, each in limits.items()}
    return Tuner(
        tuning=tuning,
        concurrency=control.get("concurrency"),
        prefetch=control.get("prefetch_factor"),
        given=given,
        readers=max(1, options.num_workers),
        batch_size=max(1, size // options.part.world_size),
        prefetch_bytes=options.prefetch_bytes,
    )


def _recorded_settings(
    options: Options, window: Window, *, reads: bool | None = None, on_device: int = 0
) -> RecordedSettings:
    """Return the settings that the report models; ``reads`` is None without workers."""
    workers = options.workers
    kind = workers if isinstance(workers, str) else type(workers).__name__
    runner: Literal["thread", "loop"] = "thread" if options.is_plain else "loop"
    is_stream = options.kind is not Kind.MAP
    is_users = is_stream and not options.is_own_stream
    is_moving = bool(window.samples or window.runs)
    return RecordedSettings(
        runner if reads is None else "workers",
        workers=options.num_workers,
        worker_kind="" if reads is None else kind,
        reads_in_workers=bool(reads),
        concurrency=1 if options.is_plain else options.concurrency,
        reads_async=options.reads_async,
        transforms_async=_transforms_batches(options),
        window=0 if window.is_lazy else None if is_moving else window.batches,
        batch_size=options.batch_size,
        is_stream=is_stream,
        is_replicated=is_users and options.reads_in_workers,
        in_order=options.in_order,
        on_device=on_device,
        stays_on_host=on_device > 0 and options.target.name is None,
        is_persistent=options.persistent_workers,
        start_method=options.start_method,
        sampler="" if is_stream else type(options.index_sampler).__name__,
        fixed=_fixed_arguments(options),
    )


def _fixed_arguments(options: Options) -> tuple[str, ...]:
    """Return the arguments that the report must not recommend to change."""
    names = [name for name in FIRST_VALUES if isinstance(getattr(options, name), Auto)]
    if options.collates_async and not options.reads_in_workers:
        names.append("num_workers")  # everything runs on the loop
    if hasattr(options.dataset, "num_threads"):  # threads limit its reads
        names.append("concurrency")
    return tuple(names)


def _transforms_batches(options: Options) -> bool:
    """Tell whether async transforms run after all reads of a batch, not per sample."""
    reads_each = options.reads_async and options.kind is Kind.MAP
    if options.batched and batch_getter(options.dataset) is not None:
        reads_each = False
    return options.transforms_async and not reads_each


def inline_settings(options: Options, epoch: Epoch) -> RecordedSettings:
    """Return the settings of a loader that makes batches in the consumer's thread."""
    window = Window(1, is_lazy=options.is_keyed)
    setting = replace(_recorded_settings(options, window), place="inline")
    if options.gathered is None or not isinstance(epoch.order, IndexOrder):
        return setting
    fixed = *setting.fixed, "prefetch_factor", "dataset"
    return replace(setting, fixed=fixed)


def _mover(options: Options, live: LoaderResources) -> "Mover | None":
    """Return the mover that pins batches or copies them to the device, or None.

    Without workers, batches are pinned where they are collated, as in torch.
    """
    live.slots.locker = None
    pins = options.num_workers > 0 and options.pins
    if not (options.is_moved or pins):
        return None
    from aioloader._device.accelerator import accelerator_of
    from aioloader._device.mover import Mover

    to, port = options.target, None
    if to.name is not None:
        port = accelerator_of(to.name, live.accelerators)
        live.slots.locker = port.locker()
    return Mover(port, to.keys, to.transform, pins=options.pins)


def make_maker(options: Options, epoch: Epoch, live: LoaderResources) -> BatchMaker:
    """Return the ``BatchMaker`` of an epoch, for this process or its workers."""
    samples, before = options.samples, epoch.start.delivered()
    dataset, part, collate_fn = options.dataset, options.part, options.collate_fn
    by_sample = options.rng == "sample"
    keys = partial(keys_of, epoch.base_seed, epoch.number, part, by_sample=by_sample)
    is_keyed, num_workers = options.is_keyed, options.num_workers
    if not num_workers and options.pins:
        collate_fn = _pinning(collate_fn)
    is_even, dataset_epoch = part.world_size > 1, epoch.dataset_epoch
    if dataset_epoch is None:
        dataset_epoch = live.numbers.chosen[1]
    if options.is_own_stream:  # the stream yields this rank's part itself
        dataset = options.for_epoch(dataset)
        outline = dataset.outline()
        dataset_epoch, total = outline.chosen_epoch, outline.total
        is_even = outline.world_size > 1 and total is not None
        samples = None if total is None else -(-total // outline.world_size)
        part = part._replace(rank=0, world_size=1)
    epoch.policy = FailurePolicy(
        options.on_failure,
        options.at_most,
        total=samples,
        before=before * (epoch.order.size or 1),
    )
    return BatchMaker(
        dataset=dataset,
        transform=options.transform,
        collate_fn=collate_fn,
        batched=options.batched,
        drop_last=options.drop_last,
        on_error=options.on_failure,
        policy=epoch.policy,
        epoch=epoch.number,
        retry=options.retry,
        allocate=live.slots.allocate,
        loads=live.loads,
        around=_around(options),
        reseed=seed_batch if is_keyed and not num_workers else None,
        seed=use_sample_rng if num_workers else seed_sample,
        keys=keys if is_keyed else None,
        part=part,
        keeps_step=options.part.world_size > 1,
        is_even=is_even and options.tail != "uneven",
        concurrency=options.concurrency,
        dataset_epoch=(live.numbers.chosen[0], dataset_epoch),
    )


def _pinning(collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return ``collate_fn`` followed by torch's pinning; async if ``collate_fn`` is."""
    pin: Callable[[Any], Any] = torch_pin.pin_memory
    if is_async_function(collate_fn):

        async def collate_async(samples: Any) -> Any:
            return pin(await collate_fn(samples))

        return collate_async
    return lambda samples: pin(collate_fn(samples))


def _around(options: Options) -> Callable[[BatchTask], Any]:
    """Return a factory of context managers that seed plain code in this process."""
    if not options.is_keyed:
        return nullcontext
    if not options.num_workers:
        return swapped_for
    is_here = options.workers == "thread" or isinstance(options.workers, Executor)
    return use_batch_rng if is_here else nullcontext


def _pool(
    options: Options, epoch: Epoch, maker: BatchMaker, live: LoaderResources
) -> Pool | None:
    workers, reads = options.workers, options.pool_reads
    if reads is None:
        return None
    pools = live.pools
    if workers == "thread":
        from aioloader._workers.threads import ThreadWorkers

        threads = ThreadWorkers(
            options.num_workers,
            reads=reads,
            init=options.worker_init_fn,
            base_seed=epoch.base_seed,
        )
        pools.join_later(threads)
        return threads
    spec = _spec(options, epoch, maker, reads=reads)
    keep = options.persistent_workers
    if isinstance(workers, Executor):
        from aioloader._workers.executors import ExecutorWorkers

        return ExecutorWorkers(workers, spec)
    start: Callable[[], LastingPool]
    if isinstance(workers, RayWorkers):
        from aioloader._workers.ray.pool import RayPool

        start = partial(RayPool, workers, spec)
    else:
        method, locker = options.start_method, live.slots.locker
        if method == "fork":
            from aioloader._workers.process.pool import ProcessPool

            start = partial(ProcessPool, spec, method, pools.supervisors, locker)
        else:
            from aioloader._workers.process.portable import start_unforked

            start = partial(start_unforked, spec, method, pools.supervisors, locker)
    begin = partial(pools.kept, start) if keep else start
    has_copies = reads and workers == "process"
    return PoolHandle(begin, reads=reads, keep=keep, has_copies=has_copies)


def _spec(
    options: Options, epoch: Epoch, maker: BatchMaker, *, reads: bool
) -> "WorkerSpec":
    from aioloader._workers.worker_spec import WorkerSpec

    transform = options.transform
    if not reads and options.transforms_async:
        transform = None  # applied where samples are read
    read = maker.dataset if reads else None
    per_worker = options.prefetch_factor or 2
    if options.follows_concurrency and reads and not options.is_plain:
        # Batches for all samples in flight, and as many spare ones as in a window.
        per_worker = math.ceil(options.concurrency / (options.batch_size or 1)) + 3
    is_auto = isinstance(options.prefetch_factor, Auto)
    most = max(per_worker, _MAX_PREFETCH_PER_WORKER) if is_auto else per_worker
    given = {"dataset": read, "transform": transform, "reads": reads}
    return WorkerSpec(
        **(maker.kwargs() | given),
        num_workers=options.num_workers,
        base_seed=epoch.base_seed,
        rng=options.rng or "batch",
        window=per_worker,
        in_flight=most * options.num_workers,
        worker_init_fn=options.worker_init_fn,
        lifespan=options.lifespan if reads else None,
        datasets=epoch.start.datasets,
    )
