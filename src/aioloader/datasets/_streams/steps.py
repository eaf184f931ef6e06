"""The steps of a stream: each is a cursor over that of the step before it."""

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
    check_again,
    skip,
)
from aioloader.datasets._tokens import encoded, text_of
from aioloader.errors import DatasetError

# Least samples per thread; smaller shares cost more for threads than they save.
_SHARE = 4
# Most samples of a window pulled at once; more would delay others.
_PULL = 1 << 13
# Empty passes in a row after which an endless stream is an error. If shards are
# shuffled, a reader's share of a pass may be empty, and its share of the next one not.
_EMPTY = 8


class Step(Cursor):
    """A cursor over another one, which it owns.

    Its parameters become attributes, or entries of the state: ``own``.
    """

    kind: ClassVar[str]
    is_one_to_one = False  # whether it passes on as many samples as it gets
    keeps_places = False  # whether each is made of the one in its place alone
    starts: ClassVar[State] = {}  # own entries at the beginning

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
        with under_way(self.reading):  # perhaps of a later pass of ``repeat``
            return await super().pull(limit)

    async def fill(self, limit: int) -> bool:
        with under_way(self.reading):
            return await super().fill(limit)

    def _here(self) -> State:
        return {"up": self.upstream.state(), **self.own}

    async def _replay(self, count: int, known: list[int] | None) -> None:
        if self.keeps_places:  # without making any again
            await skip(self.upstream.pull, count, known)
        else:
            await super()._replay(count, known)

    async def _close(self) -> None:
        await self.upstream.aclose()

    def passes(self) -> int | None:
        return self.upstream.passes()

    def _made_nothing(self, since: int | None) -> int | None:
        """Note that samples were read and none was made of them, since a pass.

        Return that pass, at first the present one. Several whole passes are an error:
        without it nothing would ever end, and other ranks would wait for this one.
        """
        now = self.passes()
        if now is None or since is None:
            return now
        if now - since > _EMPTY:
            raise ValueError(
                f"{self.kind}() made no sample of {_EMPTY} passes of a repeated stream "
                "in a row: all are empty, or are dropped; keep some, or repeat the "
                "stream after this step instead of before it"
            )
        return since


class Mapped(Step):
    """Applies a plain function to each sample, a block at a time, in a thread."""

    kind = "map"
    is_one_to_one = keeps_places = True
    function: Callable[[Any], Any]

    async def _make(self, limit: int) -> Block:
        block = await self.upstream.pull(limit)
        return await in_thread(self._apply, block) if len(block) else []

    def _apply(self, block: Block) -> list[Any]:
        return self._call(self.function, block)

    def _call(self, function: Callable[[Any], Any], block: Block) -> list[Any]:
        """Apply a function to each sample; its error becomes a ``FailedSample``."""
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
        jobs = [_guarded(function, sample, self.kind) for sample in block]
        return await asyncio.gather(*jobs)


class Decoded(Mapped):
    """Decodes samples: CPU work, so threads share a block, in order."""

    kind = "decode"

    async def _make(self, limit: int) -> Block:
        block = await self.upstream.pull(limit)
        if not len(block):
            return []
        size = max(_SHARE, -(-len(block) // _threads()))
        shares = [block[at : at + size] for at in range(0, len(block), size)]
        jobs = [in_thread(self._apply, share) for share in shares]
        return list(chain.from_iterable(await asyncio.gather(*jobs)))


def _threads() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Filtered(Mapped):
    """Keeps the samples for which a function, plain or async, returns true."""

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
            # A sample for which the function failed is passed on as its error.
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
    """Applies a coroutine function to each sample, many at a time, in order.

    When a call ends, the next one starts, whether or not there is a pull. Memory holds
    up to ``concurrency`` samples that wait for a call, and as many results that wait
    for their turn.
    """

    kind = "map"
    is_one_to_one = keeps_places = overshoots = True
    function: Callable[[Any], Awaitable[Any]]
    concurrency: int

    def __init__(self, *args: Any, **parameters: Any) -> None:
        super().__init__(*args, **parameters)
        self._waiting: deque[Any] = deque()
        self._tasks: deque[asyncio.Task[Any]] = deque()
        self._under_way = 0
        self._reading: asyncio.Task[None] | None = None
        self._has_ended = False

    async def _more(self, limit: int) -> Block:
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
        """Start calls, and read more samples for later ones."""
        reading = self._reading
        if reading is not None and reading.done() and not reading.cancelled():
            # An error stays there, and is raised after the last result.
            self._reading = None if reading.exception() is None else reading
        while self._waiting and self._under_way < self.concurrency:
            if len(self._tasks) >= 2 * self.concurrency:
                return
            job = _guarded(self.function, self._waiting.popleft(), self.kind)
            task = asyncio.create_task(job)
            self._under_way += 1
            task.add_done_callback(self._ended_call)
            self._tasks.append(task)
        # Many at once: one pull costs the same for one sample as for many.
        is_low = 2 * len(self._waiting) <= self.concurrency
        if is_low and self._reading is None and not self._has_ended:
            self._begun = self._here()
            self._reading = asyncio.create_task(self._read(self._begun))
            self._reading.add_done_callback(self._refill)

    def _ended_call(self, _task: Any) -> None:
        self._under_way -= 1
        self._refill()

    async def _read(self, before: State) -> None:
        block = await self.upstream.pull(self.concurrency)
        self._begun = None
        self._note(before, block)
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


async def _guarded(
    function: Callable[[Any], Awaitable[Any]], sample: Any, stage: str
) -> Any:
    """Apply a coroutine function to a sample; its error becomes a ``FailedSample``."""
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
    """Makes an array of tokens of each text, of many texts at a time."""

    kind = "tokenize"
    overshoots = makes_ahead = True
    column: str | None
    batch: int

    async def _make(self, limit: int) -> Block:  # noqa: ARG002  (a batch)
        return await super()._make(self.batch)

    def _apply(self, block: Block) -> list[Any]:
        column = self.column
        if column is not None and not isinstance(block, list):
            values = block.column(column)
            if values is not None:  # and no rows
                block, column = values, None
        made = self._call(partial(text_of, column=column), block)
        texts = [one for one in made if type(one) is not FailedSample]
        encode = partial(encoded, self.function)
        try:
            found = encode(texts)
        except BaseException:  # noqa: BLE001  (of one text, or of all)
            found = self._call(lambda text: encode([text])[0], texts)
        each = iter(found)
        return [one if type(one) is FailedSample else next(each) for one in made]


class Taken(Step):
    """Takes the first samples; the stream after them is not read."""

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
    """Drops the first samples, which are read, and gives the rest.

    Those that could not be read are passed on: a failure may be a whole shard, in place
    of which others' samples were dropped.
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
    """Makes batches, as lists or as columns; each is one sample of this stream.

    Failed samples of a batch come before it, one by one.
    """

    kind = "batch"
    overshoots = True
    size: int
    drop_last: bool
    # Failed samples of the next batch that were passed on, and all unreadable ones.
    _again, _lost = 0, list[int]()

    async def _replay(self, count: int, known: list[int] | None) -> None:
        # Only failed samples are dropped: those of a function may succeed now.
        self._again, self._lost = count, known or []

    async def _make(self, limit: int) -> Block:  # noqa: ARG002  (one is enough)
        parts: list[Block] = []
        found, before = 0, self._here()
        while found < self.size:
            block = await self.upstream.pull(self.size - found)
            if not len(block):
                break
            parts.append(block)
            found += len(block)
        whole, is_short = join(parts), self.drop_last and found < self.size
        if self._again:
            check_again(whole, 0, found, self._lost)
        again, self._again = self._again, 0
        if not (isinstance(whole, list) and FailedSample in set(map(type, whole))):
            return [whole] if found and not is_short else []
        self._known = before, (again, unreadable(whole))
        made: Block = [sample for sample in whole if type(sample) is FailedSample][
            again:
        ]
        good = [sample for sample in whole if type(sample) is not FailedSample]
        return [*made, good] if good and not is_short else made

    def _after(self, before: State, what: Any, count: int) -> State:
        again, lost = what or (0, ())
        taken = again + count
        return {**before, "taken": taken, "failed": lost} if taken else before


class Windowed(Step):
    """Windows of samples, of each of which a block is made.

    The stream is cut into windows, so that the state is a position, not a buffer. In a
    block, the samples that could not be read come first: so a step that passes on any
    sample of a window can tell whether the same ones fail when it is made again. Two
    windows are in memory: one that is passed on, and the next one, which is read
    meanwhile.
    """

    overshoots = makes_ahead = True
    starts: ClassVar[State] = {"number": 0}
    size: int
    seed: int

    async def _arranged(self, parts: list[Block], good: int) -> Block:
        """Return the block made of the ``good`` samples of a window."""
        raise NotImplementedError

    async def _make(self, limit: int) -> Block:  # noqa: ARG002  (a window)
        since: int | None = None
        while True:
            parts, lost, found = await self._window()
            made = await self._arranged(parts, found - len(lost))
            self.own["number"] += 1
            if lost or len(made) or not found:
                return [*lost, *made] if lost else made
            since = self._made_nothing(since)

    async def _window(self) -> tuple[list[Block], list[FailedSample], int]:
        """Return the next samples, those that could not be read, and how many."""
        parts: list[Block] = []
        found, lost = 0, list[FailedSample]()
        while found < self.size:
            block = await self.upstream.pull(min(self.size - found, _PULL))
            if not len(block):
                break
            found += len(block)
            if places := unreadable(block):
                lost += [block[place] for place in places]
                block = [
                    one
                    for one in block
                    if type(one) is not FailedSample or one.is_users
                ]
            # Lists are joined as they come: joining all at the end takes milliseconds.
            if isinstance(block, list) and parts and isinstance(parts[-1], list):
                parts[-1] += block
            else:
                parts.append([*block] if isinstance(block, list) else block)
        return parts, lost, found

    def _order(self, length: int) -> ShuffledIndices:
        share = self.reading.share
        place = self.own["number"] * share.readers + share.reader
        return keyed_order(length, self.seed, self.reading.epoch, place)


class Shuffled(Windowed):
    """Samples permuted within windows."""

    kind = "shuffle"
    is_one_to_one = True

    async def _arranged(self, parts: list[Block], good: int) -> Block:
        # If in a thread, then while the previous window is passed on.
        return await in_thread(self._permuted, parts, good, is_quick=good <= CHUNK)

    def _permuted(self, parts: list[Block], length: int) -> Block:
        order = paced(self._order(length))
        if not any(isinstance(part, list) for part in parts):
            return pick(join(parts), [*chain.from_iterable(order)])
        whole: Any = list(join(parts)) if len(parts) > 1 else parts.pop()
        permuted = [sample for places in order for sample in pick(whole, places)]
        while len(whole) > _PULL:  # freeing it at once would block
            del whole[-_PULL:]
            pause()
        return permuted


class Repeated(Step):
    """A stream, repeated from its beginning.

    To the previous steps each pass is a separate epoch, so shuffles differ. Without
    ``times``, several empty passes in a row are an error, because other ranks would
    wait for this one. So is a pass in which all samples failed: no policy could ever
    end it.
    """

    kind = "repeat"
    starts: ClassVar[State] = {"pass": 0, "good": False, "lost": None}
    open_pass: Callable[[int, State], Awaitable[Cursor]]  # its number, and where
    times: int | None
    _lost: BaseException | None = None  # the last error of a pass without good samples
    _first: State  # where the pass began, once another one did

    def passes(self) -> int | None:
        return self.own["pass"] if self.times is None else self.upstream.passes()

    async def _more(self, limit: int) -> Block:
        before, number = self._here(), self.own["pass"]
        block = await self._make(limit)
        # Nothing before the pass is read again.
        self._note(before if self.own["pass"] == number else self._first, block)
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
            if self.times is None and empty == _EMPTY:
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
            self._first = self._here()
            # If closing is interrupted, files stay open.
            await finish_despite_cancel(asyncio.create_task(before.aclose()))
        if not own["good"]:
            is_list = isinstance(block, list)
            bad = [one for one in block if type(one) is FailedSample] if is_list else []
            own["good"] = len(bad) < len(block)
            self._lost = bad[-1].error if bad else None
            own["lost"] = str(self._lost) if bad else None
        return block


class EpochPart(Step):
    """One reader's part of an epoch of a given length, of an endless stream.

    Of ``count`` samples, ``real`` are not padding, which the next epoch has again. If
    it ``leaves_out`` failed ones, others take their places. Where readers take turns, a
    failed sample comes with its substitute (``FailedSample.then``), so every count of
    samples, ``taken`` too, counts positions.
    """

    kind = "epoch_length"
    # Samples given; those of the previous epoch to drop; the state before the padding.
    starts: ClassVar[State] = {"given": 0, "again": 0, "next": None}
    count: int
    real: int
    leaves_out: bool
    in_turns: bool

    def passes(self) -> None:
        return None

    async def _replay(self, count: int, known: list[int] | None) -> None:
        # The state may be that of readers that took turns.
        before, self.in_turns = self.in_turns, self.leaves_out
        await super()._replay(count, known)
        self.in_turns = before

    async def _places(self, limit: int) -> Block:
        """Return the samples of the next places, each with those that failed there."""
        block = await self.upstream.pull(limit)
        if not self.leaves_out or not isinstance(block, list):
            return block
        places, lost = list[Any](), list[FailedSample]()
        while len(block):
            for sample in block:
                if type(sample) is FailedSample:
                    lost.append(sample)
                    continue
                places.append(
                    replace(lost[0], then=[*lost[1:], sample]) if lost else sample
                )
                lost = []
            if not lost:
                break
            block = await self.upstream.pull(limit - len(places))
        return places

    async def _make(self, limit: int) -> Block:
        own = self.own
        if own["again"]:
            await skip(self._places, own["again"])
            own["again"] = 0
        left = self.real - own["given"]
        if left <= 0:
            left = self.count - own["given"]
            if left <= 0:
                return []
            own["next"] = own["next"] or self.upstream.state()
        pull = self._places if self.in_turns else self.upstream.pull
        block = await pull(min(limit, left))
        own["given"] += len(block)
        if self.leaves_out and not self.in_turns and isinstance(block, list):
            own["given"] -= sum(type(one) is FailedSample for one in block)
        return block
