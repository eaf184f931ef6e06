"""``unbatch``: several samples of one."""

import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from aioloader._base.blocks import Bad, Block, Columns, join, read_block
from aioloader._base.outlast import in_thread
from aioloader.datasets._streams.cursors import State, check_again
from aioloader.datasets._streams.steps import Step, failed_in

# Samples whose items are in memory: plain ones, and blocks.
_PLAIN = Bad, list, tuple
_WHOLE = *_PLAIN, Columns


class Unbatched(Step):
    """Passes on the items of each sample, one by one.

    The position is that of the oldest sample with items that were not passed on, and
    how many of its items were. A list, a tuple or a block of columns is passed on
    whole; anything else is iterated in a thread, no further than needed.
    """

    kind = "unbatch"
    overshoots = True

    def __init__(self, *args: Any, **parameters: Any) -> None:
        super().__init__(*args, **parameters)
        self._samples: deque[Any] = deque()
        self._is_quick = True  # whether they are in memory whole
        self._items: Iterator[Any] | None = None  # of the first one, if it is begun
        self._given = 0  # how many of its items were made
        # Numbers of items of the next samples to be passed on; totals, for an average.
        self._lengths: deque[int] = deque()
        self._split, self._found = 0, 0

    async def _more(self, limit: int) -> Block:
        block: Block = []
        since: int | None = None
        while not block and (self._samples or await self._refill(limit)):
            block = await self._flat(limit)
            since = since if block else self._made_nothing(since)
        return block

    async def _refill(self, limit: int) -> bool:
        """Take about as many samples as have so many items; tell if there are any."""
        count = min(limit, 1 + limit * self._split // max(1, self._found))
        if not (self.upstream.ready or await self.upstream.fill(count)):
            return False
        self._samples.extend(self.upstream.take(count))
        kinds = set(map(type, self._samples))
        self._is_quick = all(issubclass(kind, _WHOLE) for kind in kinds)
        return True

    async def _flat(self, limit: int) -> Block:
        """Return about ``limit`` items of the samples, and note which ones ended."""
        if self._is_quick:
            block, lengths = self._cut(limit)
        else:
            block, lengths = await in_thread(self._cut, limit)
        self._lengths.extend(lengths)
        self._split, self._found = self._split + len(lengths), self._found + len(block)
        self.pass_on(0)  # what is empty
        return block

    def _cut(self, limit: int) -> tuple[Block, list[int]]:
        """Return items, and how many each sample had that has no more."""
        parts, lengths, found = list[Block](), list[int](), 0
        while self._samples and found < limit:
            sample = self._samples[0]
            is_columns = not isinstance(sample, _PLAIN) and isinstance(sample, Columns)
            if parts and is_columns == isinstance(parts[-1], list):
                break  # columns stay columns
            items, has_ended = self._items_of(sample, limit - found)
            found, self._given = found + len(items), self._given + len(items)
            if is_columns or not parts:
                parts.append(items if is_columns else [*items])
            else:
                parts[-1] += items
            if has_ended:
                lengths.append(self._given)
                self._samples.popleft()
                self._items, self._given = None, 0
        return join(parts), lengths

    def _items_of(self, sample: Any, limit: int) -> tuple[Any, bool]:
        """Return the next items of the first sample, and whether there are no more.

        An error is the last item.
        """
        if type(sample) is Bad:
            return [sample], True
        if isinstance(sample, _WHOLE):
            return sample, True
        try:
            if self._items is None:
                self._items = _iterated(sample)
        except BaseException as error:  # noqa: BLE001  (the policy decides)
            return [failed_in(error, self.kind)], True
        items, has_ended = read_block(self._items, limit)
        if items and type(items[-1]) is Bad:
            items[-1], has_ended = failed_in(items[-1].error, self.kind), True
        return items, has_ended

    def pass_on(self, count: int) -> None:
        """Note that items were passed on; tell the upstream of whole samples."""
        self._passed, samples = self._passed + count, 0
        while self._lengths and self._passed >= self._lengths[0]:
            self._passed -= self._lengths.popleft()
            samples += 1
        if samples:
            self.upstream.pass_on(samples)

    def state(self) -> State:
        return self._loaded or self._after(self._here(), (), self._passed)

    async def _replay(self, count: int, known: list[int] | None) -> None:
        """Drop items of the first sample alone, which may have fewer now.

        If it fails now, that was not passed on: an error is the last item of a sample.
        """
        if not await self._refill(1):
            check_again([], 0, count, known)
        while self._samples and count:
            block = await self._flat(count)
            if len(block):
                check_again(block, 0, count, known)
            each = block if isinstance(block, list) else []
            bad = [place for place, one in enumerate(each) if type(one) is Bad]
            dropped = min(count, len(block), *bad)
            count = 0 if bad else count - dropped
            self._block, self.ready = block, len(block) - dropped
            self.pass_on(dropped)

    async def _close(self) -> None:
        self._samples.clear()
        items, self._items = self._items, None
        try:
            if inspect.isgenerator(items):
                await in_thread(items.close)
        finally:
            await super()._close()


def _iterated(sample: Any) -> Iterator[Any]:
    """Return an iterator over the items of a sample."""
    kind = type(sample)
    has_items = hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")
    if not has_items or issubclass(kind, (str, bytes, bytearray, Mapping)):
        raise TypeError(
            f"unbatch() cannot split a sample of type {kind.__name__!r} into samples; "
            "it needs lists, arrays or other iterables of samples"
        )
    return iter(sample)
