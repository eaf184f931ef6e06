"""Which samples a loader delivers, in which batches: samplers, ranks, lengths."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import BatchSampler

from aioloader._loader import arguments
from aioloader._loader.ranks import (
    Ranks,
    refuse_two_deals,
    repeats_samples,
    shuffled,
    warn_of_repeats,
)
from aioloader._order.orders import (
    IndexOrder,
    IteratedOrder,
    State,
    StreamOrder,
    index_sampler_of,
    order_of,
)
from aioloader._order.ranks import WHOLE, Part
from aioloader.protocols import Kind


@dataclass(eq=False)
class Sampling:
    """What decides about the order of samples.

    Attributes:
        dataset: What is sampled.
        kind: Its kind.
        sampler: Gives indices; of a stream, a stand-in, as in torch.
        batch_sampler: Gives lists of indices; None where there are no batches.
        batch_size: Samples of a batch; None if there are no batches, or they are given.
        ranks: What was asked for about ranks.
        warns: Whether to warn of ranks that all get the same samples.
    """

    dataset: Any
    kind: Kind
    sampler: Any
    batch_sampler: Any
    batch_size: int | None
    drop_last: bool
    ranks: Ranks
    warns: bool
    _settled: Part | None = field(default=None, init=False)

    @classmethod
    def make(
        cls,
        dataset: Any,
        kind: Kind,
        ranks: Ranks,
        generator: torch.Generator | None,
        **asked: Any,
    ) -> "Sampling":
        """Return torch's samplers for torch's arguments, which have been checked.

        Args:
            dataset: What is sampled.
            kind: Its kind.
            ranks: What was asked for about ranks.
            generator: The source of the shuffle order.
            asked: ``batch_size``, ``shuffle``, ``sampler``, ``batch_sampler`` and
                ``drop_last``.

        Raises:
            ValueError: If the size is no positive integer, or ``drop_last`` no boolean;
                or if both the loader and a sampler would deal to ranks.
        """
        sampler, batch_sampler = asked["sampler"], asked["batch_sampler"]
        size, drop_last = asked["batch_size"], asked["drop_last"]
        if sampler is None:
            if ranks.is_asked() and asked["shuffle"] and kind is Kind.MAP:
                sampler = shuffled(dataset, generator)
            else:
                sampler = arguments.default_sampler(
                    dataset, kind, asked["shuffle"], generator
                )
        if batch_sampler is not None:
            size = None
        elif size is not None:
            batch_sampler = BatchSampler(sampler, size, drop_last)
        warns = repeats_samples(kind, dataset, shuffle=asked["shuffle"])
        warns = warns and not ranks.is_asked()
        refuse_two_deals(ranks.given, dataset, sampler, batch_sampler)
        parts = dataset, kind, sampler, batch_sampler, size, drop_last
        return cls(*parts, ranks, warns)

    @property
    def part(self) -> Part:
        """The part of the latest iteration; before the first, of one that would begin.

        Raises:
            ValueError: If it is looked up, and the environment is wrong.
        """
        return self._settled or self.now()

    @property
    def is_ranked(self) -> bool:
        """Whether anybody has asked for ranks, if only one."""
        return self.ranks.is_asked()

    def settle(self) -> bool:
        """Fix the part for an iteration that begins; warn, once, if nothing is dealt.

        Returns:
            Whether an earlier iteration had another part.

        Raises:
            ValueError: If it is looked up, and the environment is wrong or a sampler
                deals too.
        """
        before, self._settled = self._settled, self.now()
        if self.warns and warn_of_repeats():
            self.warns = False
        return before not in {None, self._settled}

    def now(self) -> Part:
        """Return the part of an iteration that would begin now."""
        part = self.ranks.part()
        if self.ranks.is_auto:
            refuse_two_deals(part, self.dataset, self.sampler, self.batch_sampler)
        return part or WHOLE

    @property
    def index_sampler(self) -> Any:
        """What decides about the order: what gives indices, or else batches."""
        return index_sampler_of(self.sampler, self.batch_sampler)

    @property
    def global_batch_size(self) -> int | None:
        """Samples of a batch of all ranks together; None if batches are given."""
        size = self.batch_size or 1
        if type(self.batch_sampler) is BatchSampler:
            size = self.batch_sampler.batch_size
        elif self.batch_sampler is not None:
            return None
        return size * self.part.world_size

    @property
    def ranks_of_state(self) -> int | None:
        """How many ranks can load a state, if only so many can."""
        return self.part.world_size if self.global_batch_size is None else None

    def order(self, saved: State) -> IndexOrder | IteratedOrder | StreamOrder:
        """Return the order of an epoch: a new one, or the one that was saved."""
        if self.kind is Kind.MAP:
            return order_of(self.sampler, self.batch_sampler, self.part, saved)
        return StreamOrder(self.batch_size, self.part)

    def length(self, dataset: Any) -> int:
        """Return the number of batches of an epoch, for this rank.

        Raises:
            TypeError: If the dataset or the sampler has no length.
        """
        part = self.now()
        if self.kind is not Kind.MAP:
            size, drop_last = self.batch_size or 1, self.drop_last
            if part.world_size == 1:
                whole = len(dataset) / size
                return math.floor(whole) if drop_last else math.ceil(whole)
            return part.batches(len(dataset), size, drop_last=drop_last)
        if part.world_size == 1:
            batches = self.batch_sampler
            return len(self.sampler if batches is None else batches)
        batches = self.batch_sampler
        found, size, drop_last = len(self.index_sampler), 1, False
        if type(batches) is BatchSampler:
            size, drop_last = batches.batch_size, batches.drop_last
        return part.batches(found, size, drop_last=drop_last)
