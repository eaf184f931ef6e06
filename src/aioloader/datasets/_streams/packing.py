"""The steps ``pack``, of documents to samples of one length, and ``unbatch``.

A strategy of ``pack`` is a cursor that gives rows, which are pieces of documents, and
has the position; ``Packed`` makes their arrays, many at once. Memory holds the
documents of the open row and of one read, or those of two windows, and the samples made
at once.
"""

import inspect
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np

from aioloader._base.blocks import Block, Columns, FailedSample, join, read_block
from aioloader._base.cancellation import in_thread
from aioloader._order.permutation import paced, pause
from aioloader.datasets._streams.cursors import Cursor, Reading, State, check_again
from aioloader.datasets._streams.steps import Step, Windowed, failed_in
from aioloader.datasets._tokens import IGNORED, Array, samples_of
from aioloader.errors import ShardChangedError

Overlong: TypeAlias = Literal["split", "truncate", "drop"]
_MOST = np.iinfo(np.int64).max
# Documents that are packed between two chances for other threads to take the GIL.
_MOMENT = 1 << 10
Strategy: TypeAlias = Literal["concat", "best_fit"]
Last: TypeAlias = Literal["drop", "pad"]
# Most documents that are read at once, and so again after a load.
_DOCUMENTS = 64
# Most tokens of documents that are copied on the loop: a fraction of a millisecond.
_COPIED = 1 << 17
# Most tokens of samples that are made at once: their memory stays in caches. Most
# samples, if they are short.
_TOKENS, _ROWS = 1 << 15, 512
# Samples whose items are in memory: plain ones, and blocks.
_PLAIN = FailedSample, list, tuple
_WHOLE = *_PLAIN, Columns


class Document(NamedTuple):
    """A document, or a piece of one."""

    tokens: Array  # integers, shape (length,)
    mask: Array | None = None  # which tokens are to be predicted, bool; None: all

    def part(self, start: int, stop: int | None = None) -> "Document":
        mask = None if self.mask is None else self.mask[start:stop]
        return Document(self.tokens[start:stop], mask)

    def label(self, at: int) -> int:
        """Return a token, or ``IGNORED`` if it is not to be predicted."""
        is_counted = self.mask is None or self.mask[at]
        return int(self.tokens[at]) if is_counted else IGNORED

    def framed(self, bos: int | None, eos: int | None) -> "Document":
        """Return the document with tokens added; an end counts if the last token does.

        The beginning is never predicted: no token of the document precedes it.
        """
        first, size = int(bos is not None), len(self.tokens)
        stop = first + size
        tokens = np.empty(stop + (eos is not None), np.int64)
        tokens[first:stop] = self.tokens
        if bos is not None:
            tokens[0] = bos
        if eos is not None:
            tokens[stop] = eos
        mask = self.mask
        if mask is not None:
            mask = np.zeros(len(tokens), bool)
            mask[first:stop] = self.mask
            mask[stop:] = mask[stop - 1] if size else True
        return Document(tokens, mask)


NOTHING = Document(np.empty(0, np.int64))


def document_of(sample: Any) -> Document:
    """Return the document that a sample is.

    It is integers, or a mapping with ``input_ids`` and perhaps ``loss_mask``.
    """
    mask = None
    if isinstance(sample, Mapping):
        if "input_ids" not in sample:
            raise KeyError(
                f"a document has no 'input_ids', only {[*sample]}: tokenize() texts "
                "first"
            )
        sample, mask = sample["input_ids"], sample.get("loss_mask")
    tokens = _array(sample, "iu", "a document")
    if mask is None:
        return Document(tokens)
    mask = _array(mask, "biu", "a loss_mask")
    if len(mask) != len(tokens):
        raise ValueError(
            f"a loss_mask has {len(mask):,} entries for {len(tokens):,} tokens; give "
            "one for each"
        )
    return Document(tokens, mask.astype(bool))


def _array(values: Any, kinds: str, what: str) -> Array:
    """Return values as an array of one of some ``kinds`` of dtype."""
    try:
        array = np.asarray(values)
    except (ValueError, RuntimeError) as error:
        raise TypeError(
            f"{what} must be a 1-D array, got {type(values).__name__}: {error}"
        ) from error
    if array.ndim == 1 and array.dtype.kind in kinds:
        if array.dtype == np.uint64 and array.max(initial=0) > _MOST:
            raise ValueError(
                f"{what} has {array.max():,}, which is above int64's limit"
            )
        return array
    if isinstance(values, (list, tuple)) and not values:
        return array.astype(np.int64)
    raise TypeError(
        f"{what} must be a 1-D array of integers, got {type(values).__name__} of shape "
        f"{array.shape} and dtype {array.dtype}; tokenize texts first"
    )


class PlannedRow(NamedTuple):
    """One sample that is not made yet."""

    pieces: list[Document]  # its documents; what they lack is padding
    following: int = IGNORED  # the last token's label, if labels are shifted


def laid_out(
    rows: Sequence[PlannedRow], length: int, pad: int, *, shift: bool
) -> list[dict[str, Array]]:
    """Return the samples of rows, views of arrays that they share."""
    pieces, padded = list[Document](), list[tuple[int, int]]()
    for place, row in enumerate(rows):
        pieces += row.pieces
        size = sum(len(piece.tokens) for piece in row.pieces)
        if size < length:
            pieces.append(Document(np.full(length - size, pad)))
            padded.append((place, size))
    tokens = np.concatenate([piece.tokens for piece in pieces], dtype=np.int64)
    sizes = [len(piece.tokens) for piece in pieces]
    counts = None
    if any(piece.mask is not None for piece in pieces):
        masks = [
            np.ones(len(tokens), bool) if mask is None else mask
            for tokens, mask in pieces
        ]
        counts = np.concatenate(masks)
    following = [row.following for row in rows]
    made = samples_of(tokens, sizes, following, counts, shift=shift)
    for place, size in padded:
        made["labels"][place, size:] = IGNORED
    return [
        dict(zip(made, arrays, strict=True))
        for arrays in zip(*made.values(), strict=True)
    ]


class DeliveredProgress(NamedTuple):
    """What need not be read again once a row or a failure was passed on."""

    documents: int  # how many, of those that were needed until then
    offset: int = 0  # tokens of the next one that are not needed
    failed: int | None = None  # position of a failed one among those that are


def fitted(
    documents: Iterable[Document], length: int, overlong: Overlong
) -> list[PlannedRow]:
    """Pack documents into rows by best fit, the longest first.

    Source: best fit decreasing (Johnson, "Near-Optimal Bin Packing Algorithms", 1973),
    for documents: Ding et al., "Fewer Truncations Improve Language Modeling" (2024).
    """
    pieces = [*chain.from_iterable(_cut(one, length, overlong) for one in documents)]
    sizes = [len(row.pieces[0].tokens) for row in pieces]
    rows: list[PlannedRow] = []
    for places in best_fit(sizes, length):
        row = pieces[places[0]]
        for place in places[1:]:
            row.pieces.extend(pieces[place].pieces)
        rows.append(row)
    return rows


def _cut(document: Document, length: int, overlong: Overlong) -> Iterable[PlannedRow]:
    """Return rows of one piece each."""
    size = len(document.tokens)
    if size <= length:
        return [PlannedRow([document])] if size else []
    if overlong == "drop":
        return []
    if overlong == "truncate":
        return [PlannedRow([document.part(0, length)])]
    return [
        PlannedRow(
            [document.part(at, at + length)],
            document.label(at + length) if at + length < size else IGNORED,
        )
        for at in range(0, size, length)
    ]


def best_fit(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Return which sizes, by their positions, share each bin of ``length``.

    Each goes where the least room is left that suffices, the largest first.
    """
    bins: list[list[int]] = []
    rooms: list[int] = []  # that some bin has left, ascending
    with_room: defaultdict[int, list[list[int]]] = defaultdict(list)
    order: list[int] = np.argsort(-np.asarray(sizes), kind="stable").tolist()
    for done, place in enumerate(order):
        if done % _MOMENT == _MOMENT - 1:
            pause()
        size = sizes[place]
        at = bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            found = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
            found.append(place)
        else:
            room, found = length, [place]
            bins.append(found)
        left = room - size
        if left:
            if not with_room[left]:
                insort(rooms, left)
            with_room[left].append(found)
    return bins


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
        rows = [one for one in block if type(one) is not FailedSample]
        if not rows:
            return block
        samples = iter(laid_out(rows, self.length, self.pad, shift=self.shift))
        return [one if type(one) is FailedSample else next(samples) for one in block]

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
        self._waiting: deque[Document | FailedSample] = deque()
        self._at: int = self.own["offset"]  # in the first waiting one
        # The open row, and the documents since its start that are no longer waiting.
        self._pieces: list[Document] = []
        self._room, self._held = self.length, 0
        # Of each row and failure that was not passed on, and whether it was lost.
        self._marks: deque[tuple[DeliveredProgress, bool]] = deque()
        self._read = self._tokens = 0
        # Of documents known from before a load: those that failed, and how many.
        self._failed, self._lost = self.own["failed"], self.own["lost"]
        offset = min(1, self.own["offset"])
        self._before: int = max([offset, *(at + 1 for at in self._failed)])

    async def _more(self, limit: int) -> Block:
        upstream = self.upstream
        since: int | None = None
        while not (made := self._cut(limit)):
            since = None if self._pieces else self._made_nothing(since)
            ask = self._ask(limit)
            if not (upstream.ready or await upstream.fill(ask)):
                self._check([])
                if self.last == "pad" and self._pieces:
                    made = [(PlannedRow(self._pieces), self._begin(0))]
                break
            block = upstream.take(ask)
            self._check(block)
            documents = await self._documents(block)
            self._waiting.extend(documents)
            self._read += len(documents)
            self._tokens += sum(
                len(one.tokens) for one in documents if isinstance(one, Document)
            )
        for one, passed in made:
            is_lost = type(one) is FailedSample and not one.is_users
            self._marks.append((passed, is_lost))
        return [one for one, _ in made]

    def _cut(
        self, limit: int
    ) -> list[tuple[PlannedRow | FailedSample, DeliveredProgress]]:
        """Return up to ``limit`` rows, and failures where the documents would be."""
        made: list[tuple[PlannedRow | FailedSample, DeliveredProgress]] = []
        while self._waiting and len(made) < limit:
            document = self._waiting[0]
            if type(document) is FailedSample:
                place = self._held
                self._next()
                passed = DeliveredProgress(0, failed=place) if place else self._begin(0)
                made.append((document, passed))
                continue
            assert isinstance(document, Document)
            start, size = self._at, len(document.tokens)
            stop = start + self._room
            if stop > size:
                if start < size:
                    self._pieces.append(document.part(start) if start else document)
                    self._room = stop - size
                self._next()
                continue
            self._pieces.append(document.part(start, stop))
            following = document.label(stop) if stop < size else IGNORED
            row = PlannedRow(self._pieces, following)
            if stop < size:
                self._at = stop
            else:
                self._next()
            made.append((row, self._begin(self._at)))
        return made

    def _next(self) -> None:
        self._waiting.popleft()
        self._held += 1
        self._at = 0

    def _begin(self, offset: int) -> DeliveredProgress:
        """Begin a row; all documents before it may be forgotten."""
        passed = DeliveredProgress(self._held, offset)
        self._pieces, self._room, self._held = [], self.length, 0
        return passed

    def _ask(self, limit: int) -> int:
        """Return how many documents to read: as many as are enough by their mean."""
        if not self._tokens:
            return min(limit, _DOCUMENTS)
        tokens = (limit - 1) * self.length + self._room  # that so many rows lack
        return min(1 + tokens * self._read // self._tokens, _DOCUMENTS)

    def _check(self, block: Block) -> None:
        """Check that the same documents can be read as before a load."""
        if self._read < self._before:
            check_again(block, self._read, self._before, self._lost)

    async def _documents(self, block: Block) -> list[Document | FailedSample]:
        args = block, self.bos, self.eos
        documents = await in_thread(documents_of, *args, is_quick=_is_quick(block))
        if self._read < self._before:
            self._check_first(documents)
            for place in self._failed:
                if 0 <= place - self._read < len(documents):
                    documents[place - self._read] = NOTHING
        return documents

    def _check_first(self, documents: list[Document | FailedSample]) -> None:
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
    if not isinstance(block, list) or not {*map(type, block)} <= {
        np.ndarray,
        FailedSample,
    }:
        return False
    tokens: int = sum(one.size for one in block if type(one) is not FailedSample)
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
        documents: list[Document | FailedSample] = []
        while some := [*islice(samples, _DOCUMENTS)]:
            documents += documents_of(some, self.bos, self.eos)
            pause()
        good = [one for one in documents if isinstance(one, Document)]
        rows = fitted(good, self.length, self.overlong)
        order = chain.from_iterable(paced(self._order(len(rows))))
        bad = [one for one in documents if type(one) is FailedSample]
        return [*bad, *(rows[place] for place in order)]


def documents_of(
    samples: Iterable[Any], bos: int | None, eos: int | None
) -> list[Document | FailedSample]:
    """Return samples as documents with ``bos`` and ``eos``, or as what failed."""
    is_framed = bos is not None or eos is not None
    made: list[Document | FailedSample] = []
    for sample in samples:
        if type(sample) is FailedSample:
            made.append(sample)
            continue
        try:
            document = document_of(sample)
            made.append(document.framed(bos, eos) if is_framed else document)
        except Exception as error:  # noqa: BLE001  (the policy decides)
            made.append(failed_in(error, Packed.kind))
    return made


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
        if type(sample) is FailedSample:
            return [sample], True
        if isinstance(sample, _WHOLE):
            return sample, True
        try:
            if self._items is None:
                self._items = _iterated(sample)
        except BaseException as error:  # noqa: BLE001  (the policy decides)
            return [failed_in(error, self.kind)], True
        items, has_ended = read_block(self._items, limit)
        if items and type(items[-1]) is FailedSample:
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
            bad = [place for place, one in enumerate(each) if type(one) is FailedSample]
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
