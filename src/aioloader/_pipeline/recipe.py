"""What the user gave to make batches with, as it is at ``iter()``."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from aioloader._order.failures import OnError
from aioloader._order.ranks import WHOLE, Part
from aioloader._order.retry import Retry
from aioloader.protocols import (
    Kind,
    is_async_function,
    is_stateful,
    kind_of,
    reads_async,
)


@dataclass(kw_only=True, eq=False)
class Recipe:
    """The user's objects and rules; the same in the loader and in its workers.

    Attributes:
        dataset: Where samples come from; None in workers that do not read.
        transform: Turns a sample into another, sync or async, or None.
        collate_fn: Turns samples (one sample if not ``batched``) into a batch.
        batched: Whether samples are gathered into batches.
        drop_last: Whether a stream's short last batch is dropped.
        reads: Whether samples are read; else they come with the task.
        on_error: What happens to failed samples.
        retry: When to read again, or None.
        concurrency: Samples, or awaitables of plain code, in flight on one loop.
        part: Which samples of an iterable are this rank's, and whether batches come
            with a mask.
        keeps_step: Whether other ranks read the same batches: after an error this rank
            must stay in step with them.
        is_even: Whether all ranks have the same number of batches.
    """

    dataset: Any
    transform: Callable[[Any], Any] | None
    collate_fn: Callable[[Any], Any]
    batched: bool
    drop_last: bool
    reads: bool = True
    on_error: OnError = "raise"
    retry: Retry | None = None
    concurrency: int = 64
    part: Part = WHOLE
    keeps_step: bool = False
    is_even: bool = False

    def given(self) -> dict[str, Any]:
        """Return the recipe alone, as arguments of a class that knows more."""
        return {one.name: getattr(self, one.name) for one in fields(Recipe)}

    @cached_property
    def kind(self) -> Kind:
        """How samples leave the dataset."""
        return kind_of(self.dataset) if self.reads else Kind.MAP

    @cached_property
    def reads_async(self) -> bool:
        """Whether coroutines read the samples of a map-style dataset."""
        return self.reads and self.kind is Kind.MAP and reads_async(self.dataset)

    @cached_property
    def keeps_state(self) -> bool:
        """Whether samples are read from a map-style dataset that has a state."""
        return self.reads and self.kind is Kind.MAP and is_stateful(self.dataset)

    @cached_property
    def transforms_async(self) -> bool:
        """Whether ``transform`` is a coroutine function."""
        return is_async_function(self.transform)

    @cached_property
    def collates_async(self) -> bool:
        """Whether ``collate_fn`` is a coroutine function."""
        return is_async_function(self.collate_fn)

    @cached_property
    def is_plain(self) -> bool:
        """Whether no step needs an event loop."""
        reads_async = self.kind is Kind.ASYNC_ITERABLE or self.reads_async
        return not (reads_async or self.transforms_async or self.collates_async)

    def is_stream(self) -> bool:
        """Tell whether samples are read sequentially, from a stream with a state."""
        return self.kind is not Kind.MAP
