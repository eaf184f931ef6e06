"""The steps of a stream: each is a cursor over that of the step before it."""

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import chain
from typing import Any

from aioloader._order.blocks import Bad, Block, failed, join, pick, unreadable
from aioloader._order.permutation import is_quick, keyed_order, paced, pause
from aioloader._order.raising import ends_task
from aioloader.datasets._stores.outlast import outlast
from aioloader.datasets._streams.cursors import (
    Cursor,
    Reading,
    Replayed,
    State,
    check_again,
    skip,
)
from aioloader.errors import DatasetError

# Least samples per thread; smaller shares cost more for threads than they gain.
_SHARE = 4
# Most samples of a window pulled at once; more would delay others.
_PULL = 1 << 13
# Empty passes in a row after which an endless stream is an error. If shards are
# shuffled, a reader's share of a pass may be empty, and its share of the next one not.
_EMPTY = 8
# Opens a pass, starting at a state.
OpenPass = Callable[[int, State], Awaitable[Cursor]]


class Step(Replayed):
    """A cursor over another one.

    Args:
        upstream: The other one; owned.
        state: What ``state`` returned.
        reading: The reader's iteration.
    """

    def __init__(
        self,
        upstream: Cursor,
        state: State,
        reading: Reading,  # noqa: ARG002  (what a shuffle depends on)
    ) -> None:
        super().__init__(state)
        self.upstream = upstream

    def here(self) -> State:
        """Return the position of the step before it."""
        return {"up": self.upstream.state()}

    async def close(self) -> None:
        """Close the step before it."""
        await self.upstream.aclose()


# -- functions --------------------------------------------------------------------


class Mapped(Step):
    """Applies a plain function to each sample, a block at a time, in a thread."""

    stage = "map"  # for error notes

    def __init__(
        self,
        upstream: Cursor,
        state: State,
        reading: Reading,
        function: Callable[[Any], Any],
    ) -> None:
        super().__init__(upstream, state, reading)
        self._function = function

    async def make(self, limit: int) -> Block:
        """Return the next samples, mapped."""
        block = await self.upstream.pull(limit)
        return await asyncio.to_thread(self._apply, block) if len(block) else []

    def _apply(self, block: Block) -> list[Any]:
        function, made = self._function, []
        for sample in block:
            try:
                made.append(sample if type(sample) is Bad else function(sample))
            except BaseException as error:  # noqa: BLE001  (the policy decides)
                made.append(_bad(error, self.stage))
        return made


class Decoded(Mapped):
    """Decodes samples: CPU work, so threads share a block, in order."""

    stage = "decode"

    async def make(self, limit: int) -> Block:
        """Return the next samples, decoded."""
        block = await self.upstream.pull(limit)
        if not len(block):
            return []
        size = max(_SHARE, -(-len(block) // _threads()))
        shares = [block[at : at + size] for at in range(0, len(block), size)]
        jobs = [asyncio.to_thread(self._apply, share) for share in shares]
        return list(chain.from_iterable(await asyncio.gather(*jobs)))


class Filtered(Mapped):
    """Keeps the samples for which a plain function returns true."""

    stage = "filter"

    async def make(self, limit: int) -> Block:
        """Return the next samples that pass."""
        while len(block := await self.upstream.pull(limit)):
            answers = await self._answers(block)
            # A sample for which the function failed is passed on as its error.
            kept = [
                answer if type(answer) is Bad else sample
                for sample, answer in zip(block, answers, strict=True)
                if type(answer) is Bad or answer
            ]
            if kept:
                return kept
        return []

    async def _answers(self, block: Block) -> list[Any]:
        return await asyncio.to_thread(self._apply, block)


class FilteredAsync(Filtered):
    """Keeps the samples for which a coroutine function returns true."""

    async def _answers(self, block: Block) -> list[Any]:
        jobs = [_guarded(self._function, sample, self.stage) for sample in block]
        return await asyncio.gather(*jobs)


class MappedAsync(Step):
    """Applies a coroutine function to each sample, many at a time, in order.

    When a call ends, the next one starts, whether or not there is a pull. Memory holds
    up to ``concurrency`` samples that wait for a call, and as many results that wait
    for their turn.
    """

    overshoots = True

    def __init__(
        self,
        upstream: Cursor,
        state: State,
        reading: Reading,
        *,
        function: Callable[[Any], Awaitable[Any]],
        concurrency: int,
    ) -> None:
        super().__init__(upstream, state, reading)
        self._function = function
        self._concurrency = concurrency
        self._waiting: deque[Any] = deque()
        self._tasks: deque[asyncio.Task[Any]] = deque()
        self._under_way = 0
        self._reading: asyncio.Task[None] | None = None
        self._has_ended = False

    async def replay(self, count: int, known: list[int] | None) -> bool:
        """Drop the samples passed on, without another call for each."""
        await skip(self.upstream, count, known)
        return False

    async def more(self, limit: int) -> Block:
        """Return the mapped samples that are ready, at least one."""
        self._refill()
        while not self._tasks and self._reading is not None:
            reading = self._reading
            await asyncio.wait([reading])  # cancellation does not reach it
            if reading.exception() is not None:
                self._reading = None
            reading.result()
            self._refill()
        made: list[Any] = []
        while self._tasks and len(made) < limit:
            if made and not self._tasks[0].done():
                break
            await asyncio.wait([self._tasks[0]])  # cancellation does not reach it
            made.append(self._tasks.popleft().result())
        self._refill()
        return made

    def _refill(self) -> None:
        """Start calls, and read more samples for later ones."""
        if self._reading is not None and self._reading.done():
            if self._reading.exception() is not None:
                return  # raised after the last result
            self._reading = None
        while self._waiting and self._under_way < self._concurrency:
            if len(self._tasks) >= 2 * self._concurrency:
                return
            job = _guarded(self._function, self._waiting.popleft(), "map")
            task = asyncio.create_task(job)
            self._under_way += 1
            task.add_done_callback(self._ended_call)
            self._tasks.append(task)
        # Many at once: one pull costs the same for one sample as for many.
        is_low = 2 * len(self._waiting) <= self._concurrency
        if is_low and self._reading is None and not self._has_ended:
            self._begun = self.here()
            self._reading = asyncio.create_task(self._read(self._begun))
            self._reading.add_done_callback(self._ended_reading)

    async def _read(self, before: State) -> None:
        block = await self.upstream.pull(self._concurrency)
        self._begun = None
        self.note(before, block)
        self._has_ended = not len(block)
        self._waiting.extend(block)

    def _ended_call(self, _task: asyncio.Task[Any]) -> None:
        self._under_way -= 1
        self._refill()

    def _ended_reading(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled() and reading.exception() is None:
            self._refill()

    async def close(self) -> None:
        """Cancel pending calls and reads."""
        self._has_ended = True
        self._waiting.clear()
        reading, self._reading = self._reading, None
        tasks = [*self._tasks, *([] if reading is None else [reading])]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()


async def _guarded(
    function: Callable[[Any], Awaitable[Any]], sample: Any, stage: str
) -> Any:
    """Return what a coroutine function makes of a sample, or its error as ``Bad``."""
    if type(sample) is Bad:
        return sample
    try:
        return await function(sample)
    except BaseException as error:
        if ends_task(error):
            raise
        return _bad(error, stage)


def _bad(error: BaseException, stage: str) -> Bad:
    """Return ``error`` as a ``Bad``, with a note that names the stage."""
    sample = failed(error, f"the function of {stage!r}")
    sample.error.add_note(f"aioloader: in {stage!r} of the stream")
    return sample


def _threads() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# -- counts -----------------------------------------------------------------------


class Taken(Step):
    """Takes the first samples; the stream after them is not read."""

    def __init__(
        self, upstream: Cursor, state: State, reading: Reading, count: int
    ) -> None:
        super().__init__(upstream, state, reading)
        self._left: int = state.get("left", count)

    def here(self) -> State:
        """Return how many samples are left, and the position."""
        return {**super().here(), "left": self._left}

    async def make(self, limit: int) -> Block:
        """Return the next samples, until the count is reached."""
        if self._left <= 0:
            return []
        block = await self.upstream.pull(min(limit, self._left))
        self._left -= len(block)
        return block


class Skipped(Taken):
    """Drops the first samples, which are read, and gives the rest."""

    overshoots = True

    async def make(self, limit: int) -> Block:
        """Return the next samples, preceded by those that could not be read.

        A failure may be a whole shard, in place of which others' samples were dropped.
        """
        while self._left > 0:
            block = await self.upstream.pull(self._left)
            self._left = self._left - len(block) if len(block) else 0
            if lost := unreadable(block):
                return [block[place] for place in lost]
        return await self.upstream.pull(limit)


class Batched(Step):
    """Makes batches, as lists or as columns; each is one sample of this stream.

    Failed samples of a batch come before it, one by one.
    """

    overshoots = True

    def __init__(
        self,
        upstream: Cursor,
        state: State,
        reading: Reading,
        *,
        size: int,
        drop_last: bool,
    ) -> None:
        super().__init__(upstream, state, reading)
        self._size = size
        self._drop_last = drop_last
        # Failed samples of the next batch that were passed on, and all unreadable ones.
        self._again, self._known = 0, list[int]()

    async def replay(self, count: int, known: list[int] | None) -> bool:
        """Drop only failed samples: those of a function may succeed now."""
        self._again, self._known = count, known or []
        return False

    async def more(self, limit: int) -> Block:  # noqa: ARG002  (one is enough)
        """Return the failed samples of the next batch, and the batch."""
        parts: list[Block] = []
        found, before = 0, self.here()
        while found < self._size:
            block = await self.upstream.pull(self._size - found)
            if not len(block):
                break
            parts.append(block)
            found += len(block)
        whole = join(parts)
        if self._again:
            check_again(whole, 0, found, self._known)
        again, self._again = self._again, 0
        if not (isinstance(whole, list) and Bad in set(map(type, whole))):
            batch: Block = [whole] if found and not self._is_short(found) else []
            self.note(before, batch)
            return batch
        after = partial(_batched, before, unreadable(whole), again)
        made: Block = [sample for sample in whole if type(sample) is Bad][again:]
        good = [sample for sample in whole if type(sample) is not Bad]
        if good and not self._is_short(found):
            made = [*made, good]
        self.note(after(0), made, after)
        return made

    def _is_short(self, found: int) -> bool:
        return self._drop_last and found < self._size


def _batched(before: State, lost: list[int], again: int, count: int) -> State:
    taken = again + count
    return {**before, "taken": taken, "failed": lost} if taken else before


class Shuffled(Step):
    """Samples permuted within windows, so that the state is a position, not a buffer.

    The stream is cut into windows, and each is permuted by a separate key, after those
    that could not be read: so whoever passes on any sample of a window knows whether
    the same ones fail when it is made again. Two windows are in memory: one that is
    passed on, and the next one, which is read meanwhile.
    """

    overshoots = makes_ahead = True

    def __init__(
        self,
        upstream: Cursor,
        state: State,
        reading: Reading,
        *,
        size: int,
        seed: int,
    ) -> None:
        super().__init__(upstream, state, reading)
        self._size, self._seed = size, seed
        self._epoch, self._share = reading.epoch, reading.share
        self._number: int = state.get("number", 0)

    def here(self) -> State:
        """Return the number of the window, and where it starts."""
        return {**super().here(), "number": self._number}

    async def make(self, limit: int) -> Block:  # noqa: ARG002  (a window)
        """Return the samples of the next window, permuted."""
        parts: list[Block] = []
        found, lost = 0, list[Bad]()
        while found < self._size:
            block = await self.upstream.pull(min(self._size - found, _PULL))
            if not len(block):
                break
            found += len(block)
            if places := unreadable(block):
                lost += [block[place] for place in places]
                block = [one for one in block if type(one) is not Bad or one.is_users]
            # Lists are joined as they come: joining all at the end takes milliseconds.
            if isinstance(block, list) and parts and isinstance(parts[-1], list):
                parts[-1] += block
            else:
                parts.append([*block] if isinstance(block, list) else block)
        good = found - len(lost)
        if is_quick(found):
            window = self._permuted(parts, good)
        else:  # in a thread, while the previous window is passed on
            window = await asyncio.to_thread(self._permuted, parts, good)
        self._number += 1
        return [*lost, *window] if lost else window

    def _permuted(self, parts: list[Block], length: int) -> Block:
        # Readers permute their windows differently too.
        place = self._number * self._share.readers + self._share.reader
        order = paced(keyed_order(length, self._seed, self._epoch, place))
        if not any(isinstance(part, list) for part in parts):
            return pick(join(parts), [*chain.from_iterable(order)])
        whole: Any = list(join(parts)) if len(parts) > 1 else parts.pop()
        permuted = [sample for places in order for sample in pick(whole, places)]
        while len(whole) > _PULL:  # freeing it at once would block
            del whole[-_PULL:]
            pause()
        return permuted


# -- passes -----------------------------------------------------------------------


def epoch_of_pass(epoch: int, number: int) -> int:
    """Return the epoch of a pass for the previous steps; the first: ``epoch``."""
    return epoch + (number << 32)


class Repeated(Step):
    """A stream, repeated from its beginning.

    To the previous steps each pass is a separate epoch, so shuffles differ. Without
    ``times``, several empty passes in a row are an error, because other ranks would
    wait for this one. So is a pass in which all samples failed: no policy could ever
    end it.

    Args:
        upstream: The current pass; owned.
        state: What ``state`` returned.
        reading: The reader's iteration.
        open_pass: Opens another one.
        times: Number of passes; None: endless.
    """

    def __init__(
        self,
        upstream: Cursor,
        state: State,
        reading: Reading,
        *,
        open_pass: OpenPass,
        times: int | None,
    ) -> None:
        super().__init__(upstream, state, reading)
        self._open_pass = open_pass
        self._times = times
        self._share = reading.share
        self._pass: int = state.get("pass", 0)
        self._has_good: bool = state.get("good", False)
        lost = state.get("lost")
        self._lost: BaseException | None = None if lost is None else DatasetError(lost)

    def here(self) -> State:
        """Return the position of the current pass, and its number."""
        lost = {} if self._lost is None else {"lost": str(self._lost)}
        return {**super().here(), "pass": self._pass, "good": self._has_good, **lost}

    async def make(self, limit: int) -> Block:
        """Return the next samples, all of one pass.

        Raises:
            ValueError: If there are none to repeat without end.
        """
        empty = 0
        while True:
            block = await self.upstream.pull(limit)
            if len(block):
                self._look(block)
                return block
            if self._lost is not None and not self._has_good:
                lost, self._lost = self._lost, None
                lost.add_note("aioloader: all samples failed; they are not repeated")
                raise lost
            if self._pass + 1 == self._times:
                return []
            empty = 0 if self._has_good else empty + 1
            if self._times is None and empty == _EMPTY:
                raise ValueError(
                    f"reader {self._share.reader} of {self._share.readers} had no "
                    f"samples in {empty} passes in a row, so it has none to repeat; "
                    "give it shards that have some, use fewer readers, or an iterable "
                    "that can be read again"
                )
            before = self.upstream
            self.upstream = await self._open_pass(self._pass + 1, {})
            self._pass += 1
            self._has_good = False
            # If closing is interrupted, files stay open.
            await outlast(asyncio.create_task(before.aclose()))

    def _look(self, block: Block) -> None:
        """Note whether any sample did not fail."""
        if self._has_good:
            return
        bad = [one for one in block if type(one) is Bad] if type(block) is list else []
        self._has_good = len(bad) < len(block)
        self._lost = bad[-1].error if bad else None


class EpochPart(Step):
    """One reader's part of an epoch of a given length.

    Args:
        upstream: An endless stream of samples; owned.
        state: What ``state`` returned.
        reading: The reader's iteration.
        count: How many of the epoch's samples belong to this reader.
        real: How many of these are not padding, which the next epoch has again.
        counts_failed: Whether failed samples count.
    """

    def __init__(
        self,
        upstream: Cursor,
        state: State,
        reading: Reading,
        *,
        count: int,
        real: int,
        counts_failed: bool,
    ) -> None:
        super().__init__(upstream, state, reading)
        self._given: int = state.get("given", 0)
        # Samples of the previous epoch to drop; the state before the padding.
        self._again: int = state.get("again", 0)
        self._next: State | None = state.get("next")
        self._count, self._real = count, real
        self._counts_failed = counts_failed

    def here(self) -> State:
        """Return how many samples were given, and the position of the next one."""
        more: State = {"again": self._again} if self._again else {}
        more |= {} if self._next is None else {"next": self._next}
        return {**super().here(), "given": self._given, **more}

    async def make(self, limit: int) -> Block:
        """Return the next samples of the epoch."""
        if self._again:
            await skip(self.upstream, self._again)
            self._again = 0
        left = self._real - self._given
        if left <= 0:
            left = self._count - self._given
            if left <= 0:
                return []
            self._next = self._next or self.upstream.state()
        block = await self.upstream.pull(min(limit, left))
        self._given += len(block)
        if not self._counts_failed and isinstance(block, list):
            self._given -= sum(type(one) is Bad for one in block)
        return block
