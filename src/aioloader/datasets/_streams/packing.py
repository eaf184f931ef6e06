"""The steps ``pack``, from documents to samples of one length, and ``unbatch``.

A strategy of ``pack`` is a cursor that plans rows of document pieces, and keeps the
position. ``Packed`` makes the arrays of many rows at once. Memory holds a block of
rows; ``concat`` adds the open row and a block of documents, ``best_fit`` two windows.
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
from aioloader.datasets._streams.cursors import Cursor, Reading, State, check_replayed
from aioloader.datasets._streams.steps import Step, Windowed, failed_in
from aioloader.datasets._tokens import IGNORED, Array, samples_of
from aioloader.errors import ShardChangedError

Overlong: TypeAlias = Literal["split", "truncate", "drop"]
_INT64_MAX = np.iinfo(np.int64).max
# Documents to pack before other threads get a chance to take the GIL.
_PAUSE_DOCUMENTS = 1 << 10
Strategy: TypeAlias = Literal["concat", "best_fit"]
Last: TypeAlias = Literal["drop", "pad"]
# Most documents to read at once, and so to read again after a load.
_MAX_DOCUMENTS = 64
# Most tokens to copy on the loop, which takes a fraction of a millisecond.
_LOOP_TOKENS = 1 << 17
# Most tokens of a block, so that it stays in CPU caches; most rows, if they are short.
_BLOCK_TOKENS, _BLOCK_ROWS = 1 << 15, 512
# Samples whose items are all in memory.
_PLAIN = FailedSample, list, tuple
_WHOLE = *_PLAIN, Columns


class Document(NamedTuple):
    """A document, or a piece of one."""

    tokens: Array  # integers, shape (length,)
    mask: Array | None = None  # bool: which tokens are to be predicted; None if all

    def part(self, start: int, stop: int | None = None) -> "Document":
        mask = None if self.mask is None else self.mask[start:stop]
        return Document(self.tokens[start:stop], mask)

    def label(self, index: int) -> int:
        """Return a token, or ``IGNORED`` if it is not to be predicted."""
        is_counted = self.mask is None or self.mask[index]
        return int(self.tokens[index]) if is_counted else IGNORED

    def framed(self, bos: int | None, eos: int | None) -> "Document":
        """Return the document after ``bos`` and before ``eos``, unless these are None.

        ``bos`` is never predicted. ``eos`` is masked like the document's last token.
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
    """Convert a sample (integers, or a mapping with ``input_ids``) to a document."""
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


def _array(values: Any, kinds: str, name: str) -> Array:
    """Return values as a 1-D array, whose dtype must be of one of the ``kinds``."""
    try:
        array = np.asarray(values)
    except (ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be a 1-D array, got {type(values).__name__}: {error}"
        ) from error
    if array.ndim == 1 and array.dtype.kind in kinds:
        if array.dtype == np.uint64 and array.max(initial=0) > _INT64_MAX:
            raise ValueError(
                f"{name} has {array.max():,}, which is above int64's limit"
            )
        return array
    if isinstance(values, (list, tuple)) and not values:
        return array.astype(np.int64)
    raise TypeError(
        f"{name} must be a 1-D array of integers, got {type(values).__name__} of shape "
        f"{array.shape} and dtype {array.dtype}; tokenize texts first"
    )


class PlannedRow(NamedTuple):
    """The plan of a sample, which consists of document pieces and a last label."""

    pieces: list[Document]  # of documents; padding fills the rest
    following: int = IGNORED  # the last token's label, if labels are shifted


def make_samples(
    rows: Sequence[PlannedRow], length: int, pad: int, *, shift: bool
) -> list[dict[str, Array]]:
    """Return one sample per row; the samples' arrays are views of shared arrays."""
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
    block = samples_of(tokens, sizes, following, counts, shift=shift)
    for place, size in padded:
        block["labels"][place, size:] = IGNORED
    rows_of = zip(*block.values(), strict=True)
    return [dict(zip(block, arrays, strict=True)) for arrays in rows_of]


class DeliveredProgress(NamedTuple):
    """The progress to record once a row or a failed document is delivered."""

    documents: int  # how many more documents need not be read again
    offset: int = 0  # how many tokens of the next document are delivered
    failed: int | None = None  # the position of the failed document, if it failed


def pack_best_fit(
    documents: Iterable[Document], length: int, overlong: Overlong
) -> list[PlannedRow]:
    """Pack documents into rows by best fit, placing the longest pieces first.

    Source: best fit decreasing (Johnson, "Near-Optimal Bin Packing Algorithms", 1973),
    for documents: Ding et al., "Fewer Truncations Improve Language Modeling" (2024).
    """
    pieces = [*chain.from_iterable(_cut(d, length, overlong) for d in documents)]
    sizes = [len(row.pieces[0].tokens) for row in pieces]
    rows: list[PlannedRow] = []
    for places in best_fit(sizes, length):
        row = pieces[places[0]]
        for place in places[1:]:
            row.pieces.extend(pieces[place].pieces)
        rows.append(row)
    return rows


def _cut(document: Document, length: int, overlong: Overlong) -> Iterable[PlannedRow]:
    """Return a document as rows with one piece each, of up to ``length`` tokens."""
    size = len(document.tokens)
    if size <= length:
        return [PlannedRow([document])] if size else []
    if overlong == "drop":
        return []
    if overlong == "truncate":
        return [PlannedRow([document.part(0, length)])]
    return [
        PlannedRow(
            [document.part(stop - length, stop)],
            document.label(stop) if stop < size else IGNORED,
        )
        for stop in range(length, size + length, length)
    ]


def best_fit(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Pack sizes into bins of ``length``; return the indices of each bin's sizes."""
    bins: list[list[int]] = []
    rooms: list[int] = []  # the different rooms left in bins, ascending
    with_room: defaultdict[int, list[list[int]]] = defaultdict(list)
    # The largest first, each into the bin with the least sufficient room.
    order: list[int] = np.argsort(-np.asarray(sizes), kind="stable").tolist()
    for done, place in enumerate(order):
        if done % _PAUSE_DOCUMENTS == _PAUSE_DOCUMENTS - 1:
            pause()
        size = sizes[place]
        index = bisect_left(rooms, size)
        if index < len(rooms):
            room = rooms[index]
            target = with_room[room].pop()
            if not with_room[room]:
                del rooms[index]
            target.append(place)
        else:
            room, target = length, [place]
            bins.append(target)
        left = room - size
        if left:
            if not with_room[left]:
                insort(rooms, left)
            with_room[left].append(target)
    return bins


class Packed(Step):
    """The step ``pack``, which makes samples of the rows that a strategy plans."""

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
        **options: Any,
    ) -> None:
        kind = Concatenated if strategy == "concat" else BestFit
        upstream = kind(upstream, state, reading, **options)
        super().__init__(upstream, {}, reading, **options)

    async def _next_block(self, limit: int) -> Block:
        rows = self.upstream
        # A whole block, even if few rows are needed: it costs little more than one row.
        most = min(_BLOCK_ROWS, max(1, _BLOCK_TOKENS // self.length))
        if not (rows.ready or await rows.fill(max(min(limit, _BLOCK_ROWS), most))):
            return []
        block: Any = rows.take(most)
        is_quick = self.length <= _BLOCK_TOKENS
        return await in_thread(self._samples_of, block, is_quick=is_quick)

    def _samples_of(self, block: list[Any]) -> list[Any]:
        rows = [row for row in block if type(row) is not FailedSample]
        if not rows:
            return block
        samples = iter(make_samples(rows, self.length, self.pad, shift=self.shift))
        return [row if type(row) is FailedSample else next(samples) for row in block]

    def pass_on(self, count: int) -> None:
        self.upstream.pass_on(count)

    def state(self) -> State:
        return self.upstream.state()


class Concatenated(Step):
    """The strategy ``concat``, which cuts rows from documents joined end to end.

    The state holds the position of the document in which the next row starts, and the
    row's ``offset`` in it. ``failed`` lists documents, numbered from that one, whose
    errors were passed on; if read again, they are skipped. ``lost`` lists the failed
    documents that could not be read; resuming raises an error if they can be read now.
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
        self._offset: int = self.own["offset"]  # in the first waiting document
        # The open row, its free tokens, and the documents used since its start.
        self._pieces: list[Document] = []
        self._room, self._used = self.length, 0
        # For each row or failure not passed on yet, with whether it was unreadable.
        self._progress: deque[tuple[DeliveredProgress, bool]] = deque()
        self._read = self._tokens = 0  # documents read, and their tokens
        # The failed documents of a loaded state, and how many documents it knows.
        self._failed, self._lost = self.own["failed"], self.own["lost"]
        offset = min(1, self.own["offset"])
        self._num_known: int = max([offset, *(place + 1 for place in self._failed)])

    async def _next_block(self, limit: int) -> Block:
        upstream = self.upstream
        since: int | None = None
        while not (made := self._cut(limit)):
            since = None if self._pieces else self._made_nothing(since)
            ask = self._count_to_read(limit)
            if not (upstream.ready or await upstream.fill(ask)):
                self._check([])
                if self.last == "pad" and self._pieces:
                    made = [(PlannedRow(self._pieces), self._begin_row(0))]
                break
            block = upstream.take(ask)
            self._check(block)
            documents = await self._documents(block)
            self._waiting.extend(documents)
            self._read += len(documents)
            self._tokens += sum(
                len(d.tokens) for d in documents if isinstance(d, Document)
            )
        for row, progress in made:
            is_lost = type(row) is FailedSample and not row.is_users
            self._progress.append((progress, is_lost))
        return [row for row, _ in made]

    def _cut(
        self, limit: int
    ) -> list[tuple[PlannedRow | FailedSample, DeliveredProgress]]:
        """Return up to ``limit`` rows and failures in order, each with its progress."""
        made: list[tuple[PlannedRow | FailedSample, DeliveredProgress]] = []
        while self._waiting and len(made) < limit:
            document = self._waiting[0]
            if type(document) is FailedSample:
                place = self._used
                self._end_document()
                failed = DeliveredProgress(0, failed=place)
                made.append((document, failed if place else self._begin_row(0)))
                continue
            assert isinstance(document, Document)
            start, size = self._offset, len(document.tokens)
            stop = start + self._room
            if stop > size:
                if start < size:
                    self._pieces.append(document.part(start) if start else document)
                    self._room = stop - size
                self._end_document()
                continue
            self._pieces.append(document.part(start, stop))
            following = document.label(stop) if stop < size else IGNORED
            row = PlannedRow(self._pieces, following)
            if stop < size:
                self._offset = stop
            else:
                self._end_document()
            made.append((row, self._begin_row(self._offset)))
        return made

    def _end_document(self) -> None:
        self._waiting.popleft()
        self._used += 1
        self._offset = 0

    def _begin_row(self, offset: int) -> DeliveredProgress:
        """Begin a row at ``offset``; return the progress after the previous row."""
        progress = DeliveredProgress(self._used, offset)
        self._pieces, self._room, self._used = [], self.length, 0
        return progress

    def _count_to_read(self, limit: int) -> int:
        """Return how many documents of mean length to read for ``limit`` rows."""
        if not self._tokens:
            return min(limit, _MAX_DOCUMENTS)
        tokens = (limit - 1) * self.length + self._room  # to fill the rows
        return min(1 + tokens * self._read // self._tokens, _MAX_DOCUMENTS)

    def _check(self, block: Block) -> None:
        """Check that the same documents are unreadable as when the state was saved."""
        if self._read < self._num_known:
            check_replayed(block, self._read, self._num_known, self._lost)

    async def _documents(self, block: Block) -> list[Document | FailedSample]:
        args = block, self.bos, self.eos
        documents = await in_thread(documents_of, *args, is_quick=_is_quick(block))
        if self._read < self._num_known:
            self._check_first(documents)
            for place in self._failed:
                if 0 <= place - self._read < len(documents):
                    documents[place - self._read] = NOTHING
        return documents

    def _check_first(self, documents: list[Document | FailedSample]) -> None:
        """Check that the first document after a load has at least ``offset`` tokens."""
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
            progress, is_lost = self._progress.popleft()
            if (place := progress.failed) is not None:
                self.own["failed"] = [*self.own["failed"], place]
                if is_lost:
                    self.own["lost"] = [*self.own["lost"], place]
            else:
                first = progress.documents
                documents += first
                self.own["offset"] = progress.offset
                for name in ("failed", "lost"):
                    places = self.own[name]
                    self.own[name] = [k - first for k in places if k >= first]
        self.upstream.pass_on(documents)

    def state(self) -> State:
        return {name: v for name, v in self._make_state().items() if v != []}


def _is_quick(block: Block) -> bool:
    """Tell whether converting samples to documents takes under a millisecond."""
    types = {np.ndarray, FailedSample}
    if not isinstance(block, list) or not types.issuperset(map(type, block)):
        return False
    tokens: int = sum(a.size for a in block if type(a) is not FailedSample)
    return tokens <= _LOOP_TOKENS


class BestFit(Windowed):
    """The strategy ``best_fit``, which packs windows; failed documents come first."""

    kind = "pack"
    length: int
    bos: int | None
    eos: int | None
    overlong: Overlong

    async def _arranged(self, parts: list[Block], good: int) -> Block:  # noqa: ARG002
        return await in_thread(self._packed, chain.from_iterable(parts))

    def _packed(self, samples: Iterator[Any]) -> list[Any]:
        documents: list[Document | FailedSample] = []
        while part := [*islice(samples, _MAX_DOCUMENTS)]:
            documents += documents_of(part, self.bos, self.eos)
            pause()
        good = [document for document in documents if isinstance(document, Document)]
        rows = pack_best_fit(good, self.length, self.overlong)
        order = chain.from_iterable(paced(self._order(len(rows))))
        failures = [sample for sample in documents if type(sample) is FailedSample]
        return [*failures, *(rows[place] for place in order)]


def documents_of(
    samples: Iterable[Any], bos: int | None, eos: int | None
) -> list[Document | FailedSample]:
    """Convert samples to documents with ``bos`` and ``eos``; keep failed samples."""
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
    """The step that passes on each sample's items as samples.

    The position consists of the oldest sample with items not yet passed on, and the
    number of its items passed on. A list, a tuple or a block of columns is split at
    once; any other sample is iterated in a thread, no further than needed.
    """

    kind = "unbatch"
    overshoots = True

    def __init__(self, *args: Any, **parameters: Any) -> None:
        super().__init__(*args, **parameters)
        self._samples: deque[Any] = deque()
        self._is_quick = True  # whether all items of the samples are in memory
        self._items: Iterator[Any] | None = None  # of the first sample, once iterated
        self._given = 0  # how many items of the first sample were made
        # The numbers of items of samples not passed on yet; totals, for their mean.
        self._lengths: deque[int] = deque()
        self._num_samples, self._num_items = 0, 0

    async def _next_block(self, limit: int) -> Block:
        block: Block = []
        since: int | None = None
        while not block and (self._samples or await self._refill(limit)):
            block = await self._make_items(limit)
            since = since if block else self._made_nothing(since)
        return block

    async def _refill(self, limit: int) -> bool:
        """Take samples for about ``limit`` items; return whether there are samples."""
        count = min(limit, 1 + limit * self._num_samples // max(1, self._num_items))
        if not (self.upstream.ready or await self.upstream.fill(count)):
            return False
        self._samples.extend(self.upstream.take(count))
        kinds = set(map(type, self._samples))
        self._is_quick = all(issubclass(kind, _WHOLE) for kind in kinds)
        return True

    async def _make_items(self, limit: int) -> Block:
        """Return about ``limit`` items; record the lengths of the samples used up."""
        if self._is_quick:
            block, lengths = self._cut(limit)
        else:
            block, lengths = await in_thread(self._cut, limit)
        self._lengths.extend(lengths)
        self._num_samples += len(lengths)
        self._num_items += len(block)
        self.pass_on(0)  # empty samples
        return block

    def _cut(self, limit: int) -> tuple[Block, list[int]]:
        """Return about ``limit`` items, and the lengths of the samples used up."""
        parts, lengths, count = list[Block](), list[int](), 0
        while self._samples and count < limit:
            sample = self._samples[0]
            is_columns = not isinstance(sample, _PLAIN) and isinstance(sample, Columns)
            if parts and is_columns == isinstance(parts[-1], list):
                break  # columns stay columns
            items, has_ended = self._items_of(sample, limit - count)
            count, self._given = count + len(items), self._given + len(items)
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
        """Return the next items of the first sample, and whether it has no more."""
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
        """Count items as passed on; pass used-up samples on in the upstream cursor."""
        self._passed, samples = self._passed + count, 0
        while self._lengths and self._passed >= self._lengths[0]:
            self._passed -= self._lengths.popleft()
            samples += 1
        if samples:
            self.upstream.pass_on(samples)

    def state(self) -> State:
        return self._loaded or self._state_after(self._make_state(), (), self._passed)

    async def _replay(self, count: int, failed: list[int] | None) -> None:
        """Drop the first sample's items passed on before; there may be fewer now.

        Keep an error: it was not passed on before, because an error ends its sample.
        """
        if not await self._refill(1):
            check_replayed([], 0, count, failed)
        while self._samples and count:
            block = await self._make_items(count)
            if len(block):
                check_replayed(block, 0, count, failed)
            items = block if isinstance(block, list) else []
            errors = [k for k, item in enumerate(items) if type(item) is FailedSample]
            dropped = min(count, len(block), *errors)
            count = 0 if errors else count - dropped
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
    """Return an iterator over a sample; raise a TypeError if it cannot be split."""
    kind = type(sample)
    has_items = hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")
    if not has_items or issubclass(kind, (str, bytes, bytearray, Mapping)):
        raise TypeError(
            f"unbatch() cannot split a sample of type {kind.__name__!r} into samples; "
            "it needs lists, arrays or other iterables of samples"
        )
    return iter(sample)
