"""The step ``pack``: documents in, samples of one length out.

A strategy is a cursor that gives rows, which are pieces of documents, and has the
position; ``Packed`` makes their arrays, many at once. Memory holds the documents of the
open row and of one read, or those of two windows, and the samples made at once.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from aioloader._base.blocks import Bad, Block
from aioloader._base.outlast import in_thread
from aioloader._order.permutation import paced, pause
from aioloader.datasets._streams.cursors import Cursor, Reading, State, check_again
from aioloader.datasets._streams.steps import Step, Windowed, failed_in
from aioloader.datasets._tokens.packing import (
    NOTHING,
    Concatenation,
    Document,
    Overlong,
    Passed,
    document_of,
    fitted,
    laid_out,
)
from aioloader.errors import ShardChangedError

Strategy: TypeAlias = Literal["concat", "best_fit"]
Last: TypeAlias = Literal["drop", "pad"]
# Most documents that are read at once, and so again after a load.
_DOCUMENTS = 64
# Most tokens of documents that are copied on the loop: a fraction of a millisecond.
_COPIED = 1 << 17
# Most tokens of samples that are made at once: their memory stays in caches. Most
# samples, if they are short.
_TOKENS, _ROWS = 1 << 15, 512


class Packed(Step):
    """Samples made of the rows of a strategy, whose state is its state."""

    kind = "pack"
    overshoots = True
    length: int
    pad: int
    shift: bool

    def __init__(
        self,
        upstream: Cursor,
        state: State,
        reading: Reading,
        *,
        strategy: Strategy,
        **how: Any,
    ) -> None:
        kind = Concatenated if strategy == "concat" else BestFit
        super().__init__(kind(upstream, state, reading, **how), {}, reading, **how)

    async def _more(self, limit: int) -> Block:
        rows = self.upstream
        # As many as are made for the price of one, however few are asked for.
        most = min(_ROWS, max(1, _TOKENS // self.length))
        if not (rows.ready or await rows.fill(max(min(limit, _ROWS), most))):
            return []
        block: Any = rows.take(most)
        is_quick = self.length <= _TOKENS
        return await in_thread(self._made_of, block, is_quick=is_quick)

    def _made_of(self, block: list[Any]) -> list[Any]:
        rows = [one for one in block if type(one) is not Bad]
        if not rows:
            return block
        samples = iter(laid_out(rows, self.length, self.pad, shift=self.shift))
        return [one if type(one) is Bad else next(samples) for one in block]

    def pass_on(self, count: int) -> None:
        self.upstream.pass_on(count)

    def state(self) -> State:
        return self.upstream.state()


class Concatenated(Step):
    """Rows of documents laid end to end.

    Its state is the position of the document where the next row starts, with the
    ``offset`` in it. Positions of later documents count from there: those that
    ``failed`` and were passed on, which are left out when they are read again; the
    ``lost`` ones of them could not be read, and must not be readable then.
    """

    kind = "pack"
    overshoots = True
    starts: ClassVar[State] = {"offset": 0, "failed": [], "lost": []}
    length: int
    bos: int | None
    eos: int | None
    last: Last

    def __init__(self, *args: Any, **parameters: Any) -> None:
        super().__init__(*args, **parameters)
        self._rows = Concatenation(self.length, self.own["offset"])
        # Of each row and failure that was not passed on, and whether it was lost.
        self._marks: deque[tuple[Passed, bool]] = deque()
        self._read = self._tokens = 0
        # Of documents known from before a load: those that failed, and how many.
        self._failed, self._lost = self.own["failed"], self.own["lost"]
        offset = min(1, self.own["offset"])
        self._before: int = max([offset, *(at + 1 for at in self._failed)])

    async def _more(self, limit: int) -> Block:
        rows, upstream = self._rows, self.upstream
        since: int | None = None
        while not (made := rows.cut(limit)):
            since = None if rows.has_some else self._made_nothing(since)
            ask = self._ask(limit)
            if not (upstream.ready or await upstream.fill(ask)):
                self._check([])
                made = rows.last() if self.last == "pad" else []
                break
            block = upstream.take(ask)
            self._check(block)
            documents = await self._documents(block)
            rows.add(documents)
            self._read += len(documents)
            self._tokens += sum(
                len(one.tokens) for one in documents if isinstance(one, Document)
            )
        for one, passed in made:
            is_lost = type(one) is Bad and not one.is_users
            self._marks.append((passed, is_lost))
        return [one for one, _ in made]

    def _ask(self, limit: int) -> int:
        """Return how many documents to read: as many as are enough by their mean."""
        if not self._tokens:
            return min(limit, _DOCUMENTS)
        lacking = self._rows.lacking(limit) * self._read // self._tokens
        return min(1 + lacking, _DOCUMENTS)

    def _check(self, block: Block) -> None:
        """Check that the same documents can be read as before a load."""
        if self._read < self._before:
            check_again(block, self._read, self._before, self._lost)

    async def _documents(self, block: Block) -> list[Document | Bad]:
        args = block, self.bos, self.eos
        documents = await in_thread(documents_of, *args, is_quick=_is_quick(block))
        if self._read < self._before:
            self._check_first(documents)
            for place in self._failed:
                if 0 <= place - self._read < len(documents):
                    documents[place - self._read] = NOTHING
        return documents

    def _check_first(self, documents: list[Document | Bad]) -> None:
        """Check that the first document after a load has the tokens used before."""
        first, offset = documents[0], self.own["offset"]
        if self._read or not isinstance(first, Document):
            return
        if len(first.tokens) < offset:
            raise ShardChangedError(
                f"the state was saved after {offset:,} tokens of a document that has "
                f"{len(first.tokens):,} now; resume with the same documents, or "
                "restart the epoch"
            )

    def pass_on(self, count: int) -> None:
        documents = 0
        for _ in range(count):
            passed, is_lost = self._marks.popleft()
            if (place := passed.failed) is not None:
                self.own["failed"] = [*self.own["failed"], place]
                if is_lost:
                    self.own["lost"] = [*self.own["lost"], place]
            else:
                first = passed.documents
                documents += first
                self.own["offset"] = passed.offset
                for name in ("failed", "lost"):
                    places = self.own[name]
                    self.own[name] = [at - first for at in places if at >= first]
        self.upstream.pass_on(documents)

    def state(self) -> State:
        return {name: one for name, one in self._here().items() if one != []}


def _is_quick(block: Block) -> bool:
    """Tell whether samples are documents in a fraction of a millisecond."""
    if not isinstance(block, list) or not {*map(type, block)} <= {np.ndarray, Bad}:
        return False
    tokens: int = sum(one.size for one in block if type(one) is not Bad)
    return tokens <= _COPIED


class BestFit(Windowed):
    """Rows of whole documents, packed by window; first the documents that failed."""

    kind = "pack"
    length: int
    bos: int | None
    eos: int | None
    overlong: Overlong

    async def _arranged(self, parts: list[Block], good: int) -> Block:  # noqa: ARG002
        return await in_thread(self._packed, chain.from_iterable(parts))

    def _packed(self, samples: Iterator[Any]) -> list[Any]:
        documents: list[Document | Bad] = []
        while some := [*islice(samples, _DOCUMENTS)]:
            documents += documents_of(some, self.bos, self.eos)
            pause()
        good = [one for one in documents if isinstance(one, Document)]
        rows = fitted(good, self.length, self.overlong)
        order = chain.from_iterable(paced(self._order(len(rows))))
        bad = [one for one in documents if type(one) is Bad]
        return [*bad, *(rows[place] for place in order)]


def documents_of(
    samples: Iterable[Any], bos: int | None, eos: int | None
) -> list[Document | Bad]:
    """Return samples as documents with ``bos`` and ``eos``, or as what failed."""
    is_framed = bos is not None or eos is not None
    made: list[Document | Bad] = []
    for sample in samples:
        if type(sample) is Bad:
            made.append(sample)
            continue
        try:
            document = document_of(sample)
            made.append(document.framed(bos, eos) if is_framed else document)
        except Exception as error:  # noqa: BLE001  (the policy decides)
            made.append(failed_in(error, Packed.kind))
    return made
