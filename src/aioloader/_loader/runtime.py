"""The live state of a loader in one process, such as its epochs and workers."""

import copy
import logging
import threading
import weakref
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterDataPipe

from aioloader._base import machine
from aioloader._base.forks import fork_safe
from aioloader._base.raising import raisable
from aioloader._base.records import Counters, Pace, RecordedSettings
from aioloader._base.warnings import warn
from aioloader._loader.options import Options
from aioloader._loader.sampling import draw_base_seed, seed_pipe
from aioloader._loader.state import (
    LoaderState,
    State,
    pending_state,
    record_first_states,
    restore,
    restore_sampler,
    start_of,
    state_of,
    stream_start,
    warn_of_inexact_resume,
)
from aioloader._order.epoch import BEGINNING, Epoch, EpochNumbers
from aioloader._order.indices import set_epoch
from aioloader._pipeline.plain import Feed, PlainFeed
from aioloader._pipeline.position import StateLoads
from aioloader._pipeline.runner import Runners
from aioloader._transport.slots import SlotPool
from aioloader._workers.idle import Pools
from aioloader.protocols import Kind, refuse_again

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from aioloader._device.accelerator import Accelerator
    from aioloader._observe.trace import Trace
    from aioloader._order.ranks import RankPart
    from aioloader._pipeline.iterator import BatchIterator, IteratorCore
    from aioloader._pipeline.tuner import Tuning

_LOG = logging.getLogger("aioloader")


class Runtime:
    """A loader's live state in one process; copies and pickles keep only ``loaded``."""

    def __init__(
        self, dataset: Any, numbers: EpochNumbers, loaded: LoaderState | None = None
    ) -> None:
        self._dataset = dataset
        self.loads = StateLoads()
        self.pace = Pace()
        self.slots = SlotPool()
        self.accelerators: dict[torch.device, Accelerator] = {}
        self.traces: list[Trace] = []
        self.is_reported = False  # ``report()`` was called
        self.open_iterators: weakref.WeakKeyDictionary[BatchIterator[Any], None]
        self.open_iterators = weakref.WeakKeyDictionary()
        self.numbers = numbers
        self.loaded = loaded  # a state that no iteration has resumed from yet
        self.options: Options | None = None  # the latest
        self.part: RankPart | None = None  # of the latest iteration
        self.epoch: Epoch | None = None  # the latest that has started
        self._latest_drawn: weakref.ref[Epoch] | None = None
        self._base_seed: int | None = None  # of the latest epoch
        # Whether the run that was resumed keeps it, as with persistent workers.
        self._keeps_seed: bool | None = None
        self._claim: weakref.ref[IteratorCore] | None = None
        self._lock = fork_safe(threading.Lock())
        self._runners: Runners | None = None
        self._pools: Pools | None = None

    @property  # created when needed, like ``pools``; a plain ``for`` needs neither
    def runners(self) -> Runners:
        with self._lock:
            if self._runners is None:
                self._runners = Runners(self._dataset)
            return self._runners

    @property
    def pools(self) -> Pools:
        with self._lock:
            if self._pools is None:
                self._pools = Pools()
            return self._pools

    def has_kept(self) -> bool:
        """Tell whether persistent workers of an earlier iteration still exist."""
        return self._pools is not None and self._pools.has_kept()

    @cached_property
    def cores(self) -> int:
        """CPU cores that this process may use, counted when first needed."""
        return machine.cores()

    @cached_property
    def tuning(self) -> "Tuning":
        from aioloader._pipeline.tuner import Tuning

        return Tuning()

    def draw(self, options: Options, saved: LoaderState | None) -> Epoch:
        """Draw an epoch's base seed and order, from the same generators as torch."""
        if saved is not None:
            restore_sampler(options, saved)
        order, pipe = options.order_of(None), options.dataset
        generator = options.generator
        if isinstance(pipe, IterDataPipe):
            seed_pipe(pipe, generator)
        is_first = saved is not None or self._base_seed is None
        seed = None if is_first else self._kept_seed(options)
        if seed is None:
            seed = self._base_seed = draw_base_seed(generator)
            if options.num_workers:  # with workers torch calls iter(sampler) twice
                order = options.order_of(None)
                if isinstance(pipe, IterDataPipe):
                    draw_base_seed(generator)
        keeps = self._keeps_seed
        epoch = Epoch(seed, order)
        epoch.keeps_seed = options.persistent_workers if keeps is None else keeps
        epoch.saved = saved
        self._latest_drawn = weakref.ref(epoch)
        return epoch

    def _kept_seed(self, options: Options) -> int | None:
        """Return the latest epoch's base seed if the next epoch has it, too.

        As in torch, it has while persistent workers exist. A resumed run keeps the rule
        of the one that saved its state, whatever workers it has.
        """
        is_persistent = options.persistent_workers
        keeps = is_persistent if self._keeps_seed is None else self._keeps_seed
        return self._base_seed if keeps and self.has_kept() == is_persistent else None

    def prepare(
        self,
        options: Options,
        drawn: Epoch | None,
        claim: "IteratorCore",
        *,
        is_async: bool,
    ) -> Feed:
        """Return the feed of one iteration; a later ``begin`` starts its epoch.

        The epoch is ``drawn``, a new one, or resumed from a loaded state. If
        resumed, ``claim`` holds the state: only one iteration may resume from a state.
        """
        epoch: Epoch | None = None
        try:
            while True:
                saved, epoch = self._state_to_resume(claim), drawn
                if saved is not None and saved.seed is not None:
                    epoch = Epoch(saved.seed, options.order_of(saved.order))
                elif epoch is None or (saved and epoch.saved is not saved):
                    epoch = self.draw(options, saved)
                if saved is not None:
                    keeps = saved.order.get("keeps_seed", options.persistent_workers)
                    epoch.keeps_seed = keeps
                epoch.saved = saved
                if saved is None or self._claim_state(epoch, claim):
                    break  # otherwise another thread resumes from the state
            if saved is None:
                self.numbers.reserve(epoch)
            self._begin(options, epoch)
            is_bare = not is_async and options.is_bare
            if not (is_bare or (options.is_list and options.is_at_hand(epoch.order))):
                from aioloader._loader.sources import make_source

                # Stored here: an interrupt may come before the caller stores it.
                feed = make_source(options, epoch, self, is_async=is_async)
                claim.prepared = feed
                return feed
            given = epoch, options.dataset, options.collate_fn, self.slots
            batched, concurrency = options.batched, options.concurrency
            return PlainFeed(*given, batched=batched, concurrency=concurrency)
        except BaseException as error:  # noqa: BLE001  (raised)
            if epoch is not None:
                self.numbers.release(epoch)
            claim.is_held = False
            raise raisable(error, "user code")  # noqa: B904  (it keeps its cause)

    def _claim_state(self, epoch: Epoch, claim: "IteratorCore") -> bool:
        """Claim an epoch's saved state and number; return False if they are taken."""
        with self._lock:
            is_free = self._state_to_resume(claim) is epoch.saved
            if is_free:
                self._claim, claim.is_held = weakref.ref(claim), True
                self.numbers.reserve(epoch)
        return is_free

    def _begin(self, options: Options, epoch: Epoch) -> None:
        """Begin an epoch at its saved position, or as the latest epoch's successor."""
        outline = options.outline() if options.is_own_stream else None
        saved, start, before, number = epoch.saved, BEGINNING, self.epoch, None
        if saved is not None:
            self._base_seed, self._keeps_seed = epoch.base_seed, epoch.keeps_seed
            if self._pools is not None:
                self._pools.drop()  # new workers start from the state, as in torchdata
            start, before = start_of(options, saved), None
            number = saved.dataset_epoch if start.delivered() else None
        elif outline is not None:
            start = stream_start(options, outline, before, epoch.number)
        epoch.begin(start, readers=options.readers, in_order=options.in_order)
        epoch.dataset_epoch = set_epoch(options.dataset, number)
        refuse_again(options.dataset, is_begun=self.epoch is not None)
        if saved is not None:
            warn_of_inexact_resume(options, epoch, outline)
        if options.is_stateful or options.kind is not Kind.MAP:
            is_kept = options.persistent_workers and self.has_kept()
            record_first_states(options, epoch, before, is_kept=is_kept)

    def _state_to_resume(self, claim: "IteratorCore") -> LoaderState | None:
        """Return the state from which ``claim`` may resume, or None."""
        holder = None if self._claim is None else self._claim()
        if holder is not None and holder is not claim and holder.is_held:
            return None
        saved, latest = self.loaded, self.epoch
        if saved is None and latest is not None and latest.saved is not None:
            saved = latest.saved if latest.is_untouched() else None
        return saved

    def begin(self, feed: Feed) -> None:
        """Start the epoch of a prepared iteration, and store it as the latest epoch."""
        epoch = feed.epoch
        self.numbers.begin(epoch)
        self.epoch = epoch
        epoch.counters.is_asked = self.is_reported or _LOG.isEnabledFor(logging.DEBUG)
        for trace in self.traces:
            self._follow(trace, epoch.counters)
        if self.loaded is epoch.saved:  # no other state was loaded meanwhile
            self.loaded = None

    def follow(self, trace: "Trace") -> None:
        """Record the latest iteration and all iterations under way in a trace."""
        latest = None if self.epoch is None else self.epoch.counters
        for iterator in self.iterators():
            counters = iterator.counters
            if counters and counters is not latest and iterator.is_under_way():
                self._follow(trace, counters)
        if latest is not None:
            self._follow(trace, latest)

    def _follow(self, trace: "Trace", counters: Counters) -> None:
        counters.is_asked = True
        trace.follow(counters, self._settings_of(counters))

    def watch_blocking(self) -> None:
        """From now on, look for code that blocks the event loop."""
        self.is_reported = True
        for iterator in self.iterators():
            if iterator.counters:
                iterator.counters.is_asked = True

    def settings(self) -> RecordedSettings:
        """Return the latest epoch's settings, with the current tuned values."""
        if self.epoch is None:
            return RecordedSettings("inline", cores=self.cores)
        return self._settings_of(self.epoch.counters)

    def _settings_of(self, counters: Counters) -> RecordedSettings:
        if counters.setting is None:
            from aioloader._loader.sources import inline_settings

            assert self.options is not None
            assert self.epoch is not None
            inline = partial(inline_settings, self.options, self.epoch)
            counters.setting = (counters.describe or inline)()
        setting = self.tuning.tuned(counters.setting)
        return replace(setting, cores=self.cores, used=counters.used())

    def iterators(self) -> "list[BatchIterator[Any]]":
        """Return the iterators that still exist; other threads may make more."""
        iterators = [reference() for reference in self.open_iterators.keyrefs()]
        return [iterator for iterator in iterators if iterator is not None]

    def epoch_number(self) -> int:
        """Return the current epoch's number; between epochs, the next one's."""
        if self.loaded is not None:
            return self.loaded.epoch
        epoch = self._next_epoch() or self.epoch
        is_next = epoch is None or epoch.progress.is_over or epoch.number < 0
        return self.numbers.next if is_next or epoch is None else epoch.number

    def _next_epoch(self) -> Epoch | None:
        """Return the epoch of the latest iterator if that epoch has not started.

        None while an iteration of the latest started epoch is under way.
        """
        epoch = self.epoch
        if epoch is not None and not epoch.progress.is_over:
            for iterator in self.iterators():
                if iterator.counters is epoch.counters and iterator.is_under_way():
                    return None
        return self.numbers.latest_reserved() or self.drawn()

    def drawn(self) -> Epoch | None:
        """Return the latest drawn epoch, or None once it is numbered or dropped."""
        epoch = None if self._latest_drawn is None else self._latest_drawn()
        return epoch if epoch is not None and epoch.number < 0 else None

    def warm(self, options: Options) -> None:
        """Start the fork server early if workers need it, because it starts slowly."""
        if options.has_processes and options.start_method == "forkserver":
            from aioloader._workers.process.fork_server import warm_fork_server

            warm_fork_server()

    def replace_workers(self) -> None:
        """End persistent workers, which were started for another rank or world size."""
        if self._pools is not None:
            self._pools.close()

    def state_dict(self, options: "Callable[[], Options]") -> State:
        """Return a loaded state that no iteration has resumed, or the current state."""
        now, loaded = options(), self.loaded
        prepared = None if loaded is None else self.numbers.latest_reserved()
        if prepared is not None and prepared.saved is loaded:
            return state_of(now, self.numbers, prepared, newer=None)
        if loaded is not None:
            drawn = self.drawn()
            drawn = drawn if drawn and drawn.saved is loaded else None
            return pending_state(now, loaded, drawn)
        parts, newer = (now, self.numbers, self.epoch), self._next_epoch()
        seed, is_kept = self._kept_seed(now), self.has_kept()
        return state_of(*parts, newer=newer, is_kept=is_kept, seed=seed)

    def load_state_dict(
        self, options: Options, state: LoaderState, *, strict: bool
    ) -> None:
        from aioloader._loader.state_check import fitted

        state = fitted(options, state, strict=strict)
        if any(iterator.is_under_way() for iterator in self.iterators()):
            warn("an iteration is under way: the state takes effect with the next one")
        if options.rng == "worker" and options.num_workers and state.done:
            warn(
                'rng="worker": what the generators of workers have drawn is no part of '
                "a state, so the rest of the epoch draws other random numbers; "
                'leave out rng=, or pass rng="batch", to resume exactly'
            )
        restore(options, state, self.loads)
        self.loaded = copy.deepcopy(state)

    def close(self) -> None:
        iterators = self._dismissed()
        with ExitStack() as stack:  # runs all in reverse order, even if some raise
            if self._pools is not None:
                stack.callback(self._pools.close)
            if self._runners is not None:
                stack.callback(self._runners.release)
            for iterator in iterators:
                stack.callback(iterator.close)

    async def aclose(self) -> None:
        iterators = self._dismissed()
        async with AsyncExitStack() as stack:
            if self._pools is not None:
                stack.push_async_callback(self._pools.aclose)
            if self._runners is not None:
                stack.push_async_callback(self._runners.release_async)
            for iterator in iterators:
                stack.push_async_callback(iterator.aclose)

    def _dismissed(self) -> "list[BatchIterator[Any]]":
        iterators = self.iterators()
        for iterator in iterators:
            iterator.dismiss()
        return iterators
