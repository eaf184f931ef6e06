"""The next epoch of persistent workers, started before the current one is used up.

This is a guess: that the next epoch comes, and that until then nobody uses the
generator of its order, chooses another epoch or replaces an argument. The draws for the
guess are undone, and repeated if the guess was right. It is not made where the user's
code could tell that an epoch begins early.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _InfiniteConstantSampler

from aioloader._loader.options import Options
from aioloader._order.epoch import Epoch, EpochNumbers
from aioloader._order.permutation import ShuffledIndices
from aioloader._pipeline.ahead_feed import AheadFeed
from aioloader._workers.reachable import holds_shared_memory
from aioloader.protocols import Kind

# Above this, drawing a permutation would hold up the consumer for milliseconds.
_MOST_INDICES = 1 << 18
_KNOWN = {RandomSampler, SequentialSampler, ShuffledIndices, _InfiniteConstantSampler}


def can_look_ahead(options: Options) -> bool:
    """Tell whether the order of the next epoch can be drawn now and undone.

    True for torch's samplers and ours; a user's may depend on anything. So may a user's
    ``__iter__``, such as on a number of the epoch in shared memory, which is how
    workers that persist learn of it; samples are made early only without such
    memory.
    """
    sampler, batch_type = options.index_sampler, type(options.batch_sampler)
    is_known = options.kind is Kind.MAP or options.is_own_stream
    # Where the next epoch of a stream with ``epoch_length`` starts is not known yet.
    continues = options.is_own_stream and options.dataset.continues()
    is_told = hasattr(options.dataset, "set_epoch")  # of the epoch, before it begins
    if continues or is_told or not (is_known and options.has_copies):
        return False
    if batch_type not in {BatchSampler, type(None)}:
        return False
    if options.rng == "worker" or options.worker_init_fn is not None:
        return False  # a wrong guess would draw from the generators of the workers
    if holds_shared_memory(options.dataset, options.transform, options.collate_fn):
        return False
    if type(sampler) not in _KNOWN or (
        type(sampler).__iter__.__module__ != type(sampler).__module__  # replaced
    ):
        return False
    return type(sampler) is not RandomSampler or sampler.num_samples <= _MOST_INDICES


def _order_of(options: Options) -> list[Any]:
    """Return what an order depends on, to tell whether it changes.

    The attributes of torch's samplers may be assigned between epochs, as ``batch_size``
    is where it grows, and a dataset may grow or shrink.
    """
    sampler = options.index_sampler
    found: list[Any] = [sampler]
    for one in (options.batch_sampler, sampler):
        if type(one) in {BatchSampler, RandomSampler, SequentialSampler}:
            found += vars(one).values()
    if type(sampler) in {RandomSampler, SequentialSampler}:
        found.append(len(sampler))
    return found


def _are_same(before: list[Any], now: list[Any]) -> bool:
    """Tell whether numbers are equal, and other values the same objects."""
    return len(before) == len(now) and all(
        one is other or (type(one) is type(other) is int and one == other)
        for one, other in zip(before, now, strict=True)
    )


class Ahead:
    """An epoch started before its iterator is requested."""

    def __init__(
        self,
        options: Options,
        numbers: EpochNumbers,
        make: Callable[[], tuple[Epoch, AheadFeed]],
    ) -> None:
        generator = getattr(options.index_sampler, "generator", None)
        self._generator = torch.default_generator if generator is None else generator
        self._options = options
        self._numbers = numbers
        self._before = numbers.state(), self._drawn()
        self._order = _order_of(options)
        self.epoch, self.source = make()
        # No iterator owns it yet: it ends when this object is dropped.
        self._finalizer = weakref.finalize(self, self.source.pipeline.dismiss)
        self._issue(self._before[1])

    def issue(self) -> None:
        """Issue one more request: a batch of the previous epoch was delivered.

        Drawing its indices must not move the user's generator.
        """
        now = self._drawn()
        self._generator.set_state(self._after)
        self._issue(now)

    def _issue(self, now: torch.Tensor) -> None:
        self.source.open(1)
        self._after = self._drawn()
        self._generator.set_state(now)

    def claim(self, options: Options) -> bool:
        """Return whether the guess was right; if not, end the epoch.

        If it was right, the generator keeps the draws.
        """
        state, drawn = self._before
        is_right = (
            options is self._options
            and state == self._numbers.state()
            and _are_same(self._order, _order_of(options))
            and torch.equal(drawn, self._drawn())
        )
        if not is_right:
            self.dismiss()
            return False
        self._generator.set_state(self._after)
        self._finalizer.detach()
        self._numbers.reserve(self.epoch)
        return True

    def dismiss(self) -> None:
        self._finalizer()

    def _drawn(self) -> torch.Tensor:
        return self._generator.get_state()
