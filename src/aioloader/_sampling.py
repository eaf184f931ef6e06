"""Which samples a loader delivers, in which batches: samplers, ranks, lengths."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler

from aioloader import _arguments as arguments
from aioloader._order.orders import (
    IndexOrder,
    IteratedOrder,
    State,
    StreamOrder,
    index_sampler_of,
    order_of,
)
from aioloader._order.ranks import WHOLE, Part
from aioloader._ranks import check_dealt_once, shuffled
from aioloader.protocols import Kind


@dataclass(frozen=True, eq=False)
class Sampling:
    """What decides about the order of samples.

    Attributes:
        kind: Of the dataset.
        sampler: Gives indices; of a stream, a stand-in, as in torch.
        batch_sampler: Gives lists of indices; None where there are no batches.
        batch_size: Samples of a batch; None if there are no batches, or they are given.
        part: Which rank's part is delivered.
        is_ranked: Whether anybody has asked for ranks, if only one.
    """

    kind: Kind
    sampler: Any
    batch_sampler: Any
    batch_size: int | None
    drop_last: bool
    part: Part
    is_ranked: bool

    @classmethod
    def make(
        cls,
        dataset: Any,
        kind: Kind,
        part: Part | None,
        generator: torch.Generator | None,
        **asked: Any,
    ) -> "Sampling":
        """Return torch's samplers for torch's arguments, which have been checked.

        Args:
            dataset: What is sampled.
            kind: Its kind.
            part: Which rank's part, if anybody has asked for ranks.
            generator: The source of the shuffle order.
            asked: ``batch_size``, ``shuffle``, ``sampler``, ``batch_sampler`` and
                ``drop_last``.

        Raises:
            ValueError: If the size is no positive integer, or ``drop_last`` no boolean.
        """
        sampler, batch_sampler = asked["sampler"], asked["batch_sampler"]
        size, drop_last = asked["batch_size"], asked["drop_last"]
        if sampler is None:
            if part is not None and asked["shuffle"] and kind is Kind.MAP:
                sampler = shuffled(dataset, generator)
            else:
                sampler = arguments.default_sampler(
                    dataset, kind, asked["shuffle"], generator
                )
        if batch_sampler is not None:
            size = None
        elif size is not None:
            batch_sampler = BatchSampler(sampler, size, drop_last)
        is_ranked = part is not None
        part = part or WHOLE
        return cls(kind, sampler, batch_sampler, size, drop_last, part, is_ranked)

    def __post_init__(self) -> None:
        check_dealt_once(self.part, self.sampler, self.batch_sampler)

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
        if self.kind is not Kind.MAP:
            size, drop_last = self.batch_size or 1, self.drop_last
            if self.part.world_size == 1:
                whole = len(dataset) / size
                return math.floor(whole) if drop_last else math.ceil(whole)
            return self.part.batches(len(dataset), size, drop_last=drop_last)
        if self.part.world_size == 1:
            batches = self.batch_sampler
            return len(self.sampler if batches is None else batches)
        batches = self.batch_sampler
        found, size, drop_last = len(self.index_sampler), 1, False
        if type(batches) is BatchSampler:
            size, drop_last = batches.batch_size, batches.drop_last
        return self.part.batches(found, size, drop_last=drop_last)
