"""The steps of a stream, each of which is a cursor over the previous step's cursor."""

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar

from aioloader._base.blocks import Block, FailedSample, failed, join, pick, unreadable
from aioloader._base.cancellation import cancel, finish_despite_cancel, in_thread
from aioloader._base.raising import ends_task
from aioloader._order.epoch import under_way
from aioloader._order.permutation import (
    CHUNK,
    ShuffledIndices,
    keyed_order,
    paced,
    pause,
)
from aioloader.datasets._streams.cursors import (
    Cursor,
    Reading,
    State,
    check_replayed,
    skip,
)
from aioloader.datasets._tokens import encoded, text_of
from aioloader.errors import DatasetError

# Least samples per thread: for fewer, a thread costs more than it saves.
_MIN_SAMPLES = 4
# Most samples of a window to pull or to free at once; more would block other tasks.
_MAX_PULL = 1 << 13
# Empty passes in a row after which an endless stream is an error. One is no error, as
# with shuffled shards a reader's share may be empty in one pass, but not in the next.
_EMPTY_PASSES = 8


class Step(Cursor):
    """The base of steps, which read ``upstream``; parameters become attributes."""

    kind: ClassVar[str]
    is_one_to_one = False  # whether it makes as many samples as it gets
    keeps_places = False  # whether its nth sample is made from the nth it gets
    starts: ClassVar[State] = {}  # the step's entries of the state at the beginning

    def __init__(
        self, upstream: Cursor, state: State, reading: Reading, **parameters: Any
    ) -> None:
        super().__init__(state)
        self.upstream = upstream
        self.reading = reading
        vars(self).update(parameters)
        own = {**self.starts, **parameters, **state}
        self.own: State = {name: own[name] for name in self.starts}

    async def pull(self, limit: int) -> Block:
        with under_way(self.reading):  # its epoch may be a pass of ``repeat``
            return await super().pull(limit)

    async def fill(self, limit: int) -> bool:
        with under_way(self.reading):
            return await super().fill(limit)

    def _make_state(self) -> State:
        return {"up": self.upstream.state(), **self.own}

    async def _replay(self, count: int, failed: list[int] | None) -> None:
        if self.keeps_places:  # the step need not make the samples again
            await skip(self.upstream.pull, count, failed)
        else:
            await super()._replay(count, failed)

    async def _close(self) -> None:
        await self.upstream.aclose()

    def passes(self) -> int | None:
        return self.upstream.passes()

    def _made_nothing(self, since: int | None) -> int | None:
        """Return the first empty pass: ``since``, or the current pass if that is None.

        Called after a read that made no sample. Several whole passes without samples
        are an error: the stream would never end, and other ranks would wait.
        """
        now = self.passes()
        if now is None or since is None:
            return now
        if now - since > _EMPTY_PASSES:
            raise ValueError(
                f"{self.kind}() made no sample of {_EMPTY_PASSES} passes of a repeated "
                "stream in a row: all are empty, or are dropped; keep some, or repeat "
                "the stream after this step instead of before it"
            )
        return since


class Mapped(Step):
    """The step ``map`` with a plain function; a thread applies it, block by block."""

    kind = "map"
    is_one_to_one = keeps_places = True
    function: Callable[[Any], Any]

    async def _make(self, limit: int) -> Block:
        block = await self.upstream.pull(limit)
        return await in_thread(self._apply, block) if len(block) else []

    def _apply(self, block: Block) -> list[Any]:
        return self._call(self.function, block)

    def _call(self, function: Callable[[Any], Any], block: Block) -> list[Any]:
        """Apply a function to each sample; turn each error into a ``FailedSample``."""
        made: list[Any] = []
        for sample in block:
            try:
                made.append(
                    sample if type(sample) is FailedSample else function(sample)
                )
            except BaseException as error:  # noqa: BLE001  (the policy decides)
                made.append(failed_in(error, self.kind))
        return made

    async def _await(
        self, function: Callable[[Any], Awaitable[Any]], block: Block
    ) -> list[Any]:
        calls = [_call_async(function, sample, self.kind) for sample in block]
        return await asyncio.gather(*calls)


class Decoded(Mapped):
    """The step ``decode``, in which threads share each block; results keep order."""

    kind = "decode"

    async def _make(self, limit: int) -> Block:
        block = await self.upstream.pull(limit)
        if not len(block):
            return []
        size = max(_MIN_SAMPLES, -(-len(block) // _threads()))
        shares = [block[k : k + size] for k in range(0, len(block), size)]
        jobs = [in_thread(self._apply, share) for share in shares]
        return list(chain.from_iterable(await asyncio.gather(*jobs)))


def _threads() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Filtered(Mapped):
    """The step ``filter``, which keeps samples for which a function returns true."""

    kind = "filter"
    is_one_to_one = keeps_places = False
    is_async: bool

    async def _make(self, limit: int) -> Block:
        since: int | None = None
        while len(block := await self.upstream.pull(limit)):
            if self.is_async:
                answers = await self._await(self.function, block)
            else:
                answers = await in_thread(self._apply, block)
            # Where the function failed, its error replaces the sample.
            kept = [
                answer if type(answer) is FailedSample else sample
                for sample, answer in zip(block, answers, strict=True)
                if type(answer) is FailedSample or answer
            ]
            if kept:
                return kept
            since = self._made_nothing(since)
        return []


class MappedAsync(Step):
    """The step ``map`` with a coroutine function; calls overlap, results keep order.

    A call starts when another ends, even without a pull. Memory holds up to 1.5 times
    ``concurrency`` waiting samples, and twice ``concurrency`` calls and results.
    """

    kind = "map"
    is_one_to_one = keeps_places = overshoots = True
    function: Callable[[Any], Awaitable[Any]]
    concurrency: int

    def __init__(self, *args: Any, **parameters: Any) -> None:
        super().__init__(*args, **parameters)
        self._waiting: deque[Any] = deque()
        self._tasks: deque[asyncio.Task[Any]] = deque()
        self._running = 0  # calls that have not ended
        self._reading: asyncio.Task[None] | None = None
        self._has_ended = False

    async def _next_block(self, limit: int) -> Block:
        self._refill()
        while not self._tasks and (reading := self._reading) is not None:
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

    def _refill(self, _ended: Any = None) -> None:
        """Start calls for waiting samples, and read samples for later calls."""
        reading = self._reading
        if reading is not None and reading.done() and not reading.cancelled():
            # An error stays in the task, and is raised after the last result.
            self._reading = None if reading.exception() is None else reading
        while self._waiting and self._running < self.concurrency:
            if len(self._tasks) >= 2 * self.concurrency:
                return
            job = _call_async(self.function, self._waiting.popleft(), self.kind)
            task = asyncio.create_task(job)
            self._running += 1
            task.add_done_callback(self._end_call)
            self._tasks.append(task)
        # A pull costs nearly the same for one sample as for many, so read rarely.
        is_low = 2 * len(self._waiting) <= self.concurrency
        if is_low and self._reading is None and not self._has_ended:
            self._ahead_state = self._make_state()
            self._reading = asyncio.create_task(self._read(self._ahead_state))
            self._reading.add_done_callback(self._refill)

    def _end_call(self, _task: Any) -> None:
        self._running -= 1
        self._refill()

    async def _read(self, before: State) -> None:
        block = await self.upstream.pull(self.concurrency)
        self._ahead_state = None
        self._note_block(before, block)
        self._has_ended = not len(block)
        self._waiting.extend(block)

    async def _close(self) -> None:
        self._has_ended = True
        self._waiting.clear()
        tasks = [*self._tasks, *filter(None, [self._reading])]
        self._tasks.clear()
        await cancel(tasks)
        self._reading = None
        await super()._close()


async def _call_async(
    function: Callable[[Any], Awaitable[Any]], sample: Any, stage: str
) -> Any:
    """Apply a coroutine function to a sample; turn an error into a ``FailedSample``."""
    if type(sample) is FailedSample:
        return sample
    try:
        return await function(sample)
    except BaseException as error:
        if ends_task(error):
            raise
        return failed_in(error, stage)


def failed_in(error: BaseException, stage: str) -> FailedSample:
    sample = failed(error, f"the function of {stage!r}")
    sample.error.add_note(f"aioloader: in {stage!r} of the stream")
    return sample


class Tokenized(Mapped):
    """The step ``tokenize``, which makes token arrays of texts, ``batch`` at a time."""

    kind = "tokenize"
    overshoots = prefetches = True
    column: str | None
    batch: int

    async def _make(self, limit: int) -> Block:  # noqa: ARG002  (whole batches)
        return await super()._make(self.batch)

    def _apply(self, block: Block) -> list[Any]:
        column = self.column
        if column is not None and not isinstance(block, list):
            values = block.column(column)
            if values is not None:  # without making rows
                block, column = values, None
        results = self._call(partial(text_of, column=column), block)
        texts = [text for text in results if type(text) is not FailedSample]
        encode = partial(encoded, self.function)
        try:
            arrays = encode(texts)
        except BaseException:  # noqa: BLE001  (of one text, or of all)
            arrays = self._call(lambda text: encode([text])[0], texts)
        each = iter(arrays)
        return [r if type(r) is FailedSample else next(each) for r in results]


class Taken(Step):
    """The step ``take``, which passes on the first samples, and reads no others."""

    kind = "take"
    starts: ClassVar[State] = {"left": 0}

    def passes(self) -> None:
        return None

    async def _make(self, limit: int) -> Block:
        if self.own["left"] <= 0:
            return []
        block = await self.upstream.pull(min(limit, self.own["left"]))
        self.own["left"] -= len(block)
        return block


class Skipped(Step):
    """The step ``skip``, which drops the first samples and passes on the rest.

    Unreadable samples among the first are passed on. A whole unreadable shard counts as
    one sample, so more samples of later shards are dropped.
    """

    kind = "skip"
    overshoots = True
    starts: ClassVar[State] = {"left": 0}

    async def _make(self, limit: int) -> Block:
        while (left := self.own["left"]) > 0:
            block = await self.upstream.pull(left)
            self.own["left"] = left - len(block) if len(block) else 0
            if lost := unreadable(block):
                return [block[place] for place in lost]
        return await self.upstream.pull(limit)


class Batched(Step):
    """The step ``batch``, which makes lists or columns; failed samples come first."""

    kind = "batch"
    overshoots = True
    size: int
    drop_last: bool
    # How many failures of the next batch were passed on, and which were unreadable.
    _passed_failures, _lost = 0, list[int]()

    async def _replay(self, count: int, failed: list[int] | None) -> None:
        # ``_make`` drops failures: a function that failed may succeed now.
        self._passed_failures, self._lost = count, failed or []

    async def _make(self, limit: int) -> Block:  # noqa: ARG002  (one batch)
        parts: list[Block] = []
        count, before = 0, self._make_state()
        while count < self.size:
            block = await self.upstream.pull(self.size - count)
            if not len(block):
                break
            parts.append(block)
            count += len(block)
        whole, is_short = join(parts), self.drop_last and count < self.size
        passed, self._passed_failures = self._passed_failures, 0
        if passed:
            check_replayed(whole, 0, count, self._lost)
        if not (isinstance(whole, list) and FailedSample in set(map(type, whole))):
            return [whole] if count and not is_short else []
        self._origin = before, (passed, unreadable(whole))
        good = [sample for sample in whole if type(sample) is not FailedSample]
        failures = [sample for sample in whole if type(sample) is FailedSample]
        made: Block = failures[passed:]
        return [*made, good] if good and not is_short else made

    def _state_after(self, before: State, details: Any, count: int) -> State:
        passed, lost = details or (0, ())
        taken = passed + count
        return {**before, "taken": taken, "failed": lost} if taken else before


class Windowed(Step):
    """The base of steps that make one block from each window of ``size`` samples.

    The stream is cut into windows, so that the state is a position, not a buffer. A
    window's unreadable samples come first in its block. So if a load makes the block
    again, and drops samples, it can check that the same samples are still unreadable.
    Memory holds two windows: one is passed on while the next window is read.
    """

    overshoots = prefetches = True
    starts: ClassVar[State] = {"number": 0}
    size: int
    seed: int

    async def _arranged(self, parts: list[Block], good: int) -> Block:
        """Return a window's ``parts``, which contain ``good`` samples, as one block."""
        raise NotImplementedError

    async def _make(self, limit: int) -> Block:  # noqa: ARG002  (a window)
        since: int | None = None
        while True:
            parts, lost, count = await self._window()
            made = await self._arranged(parts, count - len(lost))
            self.own["number"] += 1
            if lost or len(made) or not count:
                return [*lost, *made] if lost else made
            since = self._made_nothing(since)

    async def _window(self) -> tuple[list[Block], list[FailedSample], int]:
        """Return a window's readable and unreadable samples, and their total number."""
        parts: list[Block] = []
        count, lost = 0, list[FailedSample]()
        while count < self.size:
            block = await self.upstream.pull(min(self.size - count, _MAX_PULL))
            if not len(block):
                break
            count += len(block)
            if places := unreadable(block):
                lost += [block[place] for place in places]
                block = [s for s in block if type(s) is not FailedSample or s.is_users]
            # Lists are joined one by one: joining all at the end takes milliseconds.
            if isinstance(block, list) and parts and isinstance(parts[-1], list):
                parts[-1] += block
            else:
                parts.append([*block] if isinstance(block, list) else block)
        return parts, lost, count

    def _order(self, length: int) -> ShuffledIndices:
        """Return the random order of ``length`` samples of the current window."""
        share = self.reading.share
        place = self.own["number"] * share.readers + share.reader
        return keyed_order(length, self.seed, self.reading.epoch, place)


class Shuffled(Windowed):
    """The step ``shuffle``, which permutes samples within windows."""

    kind = "shuffle"
    is_one_to_one = True

    async def _arranged(self, parts: list[Block], good: int) -> Block:
        # A thread runs while the previous window is passed on.
        return await in_thread(self._permuted, parts, good, is_quick=good <= CHUNK)

    def _permuted(self, parts: list[Block], length: int) -> Block:
        order = paced(self._order(length))
        if not any(isinstance(part, list) for part in parts):
            return pick(join(parts), [*chain.from_iterable(order)])
        whole: Any = list(join(parts)) if len(parts) > 1 else parts.pop()
        permuted = [sample for places in order for sample in pick(whole, places)]
        while len(whole) > _MAX_PULL:  # freeing it at once would block
            del whole[-_MAX_PULL:]
            pause()
        return permuted


class Repeated(Step):
    """The step ``repeat``, which reads the stream again from its beginning.

    For the previous steps each pass is a separate epoch, so shuffles differ. Without
    ``times``, several empty passes in a row are an error, because other ranks would
    wait for this rank. A pass in which all samples failed is always an error: if errors
    are skipped, an endless stream would never end.
    """

    kind = "repeat"
    starts: ClassVar[State] = {"pass": 0, "good": False, "lost": None}
    open_pass: Callable[[int, State], Awaitable[Cursor]]  # gets a pass and a state
    times: int | None
    _lost: BaseException | None = None  # the last error of a pass without good samples
    _first: State  # the state at the beginning of the second or a later pass

    def passes(self) -> int | None:
        return self.own["pass"] if self.times is None else self.upstream.passes()

    async def _next_block(self, limit: int) -> Block:
        before, number = self._make_state(), self.own["pass"]
        block = await self._make(limit)
        # Resuming does not read the end of the previous pass.
        self._note_block(before if self.own["pass"] == number else self._first, block)
        return block

    async def _make(self, limit: int) -> Block:
        own, empty = self.own, 0
        while not len(block := await self.upstream.pull(limit)):
            if own["lost"] is not None and not own["good"]:
                lost = self._lost or DatasetError(own["lost"])
                own["lost"] = self._lost = None
                lost.add_note("aioloader: all samples failed; they are not repeated")
                raise lost
            if own["pass"] + 1 == self.times:
                return []
            empty = 0 if own["good"] else empty + 1
            if self.times is None and empty == _EMPTY_PASSES:
                share = self.reading.share
                raise ValueError(
                    f"reader {share.reader} of {share.readers} had no samples in "
                    f"{empty} passes in a row, so it has none to repeat; give it "
                    "shards that have some, use fewer readers, or an iterable that can "
                    "be read again"
                )
            before = self.upstream
            self.upstream = await self.open_pass(own["pass"] + 1, {})
            own.update({"pass": own["pass"] + 1, "good": False, "lost": None})
            self._first = self._make_state()
            # An interrupted close would leave files open.
            await finish_despite_cancel(asyncio.create_task(before.aclose()))
        if not own["good"]:
            is_list = isinstance(block, list)
            failures = [s for s in block if type(s) is FailedSample] if is_list else []
            own["good"] = len(failures) < len(block)
            self._lost = failures[-1].error if failures else None
            own["lost"] = str(self._lost) if failures else None
        return block


class EpochPart(Step):
    """The step ``epoch_length``, which cuts a reader's part of an epoch from a stream.

    The first ``real`` of the ``count`` samples are not padding; the next epoch starts
    after the real ones. With ``leaves_out``, other samples replace failed ones. If
    readers take turns, a failed sample comes with its substitute, in ``then``, so every
    count of samples, even ``taken``, is a count of positions.
    """

    kind = "epoch_length"
    # Samples made; samples of the last epoch to drop; the state before the padding.
    starts: ClassVar[State] = {"given": 0, "again": 0, "next": None}
    count: int
    real: int
    leaves_out: bool
    in_turns: bool

    def passes(self) -> None:
        return None

    async def _replay(self, count: int, failed: list[int] | None) -> None:
        # The state may be from readers that took turns.
        before, self.in_turns = self.in_turns, self.leaves_out
        await super()._replay(count, failed)
        self.in_turns = before

    async def _pull_positions(self, limit: int) -> Block:
        """Return the next positions' samples, each with the failures before it."""
        block = await self.upstream.pull(limit)
        if not self.leaves_out or not isinstance(block, list):
            return block
        samples, lost = list[Any](), list[FailedSample]()
        while len(block):
            for sample in block:
                if type(sample) is FailedSample:
                    lost.append(sample)
                    continue
                samples.append(
                    replace(lost[0], then=[*lost[1:], sample]) if lost else sample
                )
                lost = []
            if not lost:
                break
            block = await self.upstream.pull(limit - len(samples))
        return samples

    async def _make(self, limit: int) -> Block:
        own = self.own
        if own["again"]:
            await skip(self._pull_positions, own["again"])
            own["again"] = 0
        left = self.real - own["given"]
        if left <= 0:
            left = self.count - own["given"]
            if left <= 0:
                return []
            own["next"] = own["next"] or self.upstream.state()
        pull = self._pull_positions if self.in_turns else self.upstream.pull
        block = await pull(min(limit, left))
        own["given"] += len(block)
        if self.leaves_out and not self.in_turns and isinstance(block, list):
            own["given"] -= sum(type(sample) is FailedSample for sample in block)
        return block
