"""Documents packed into rows of one length: which tokens of which documents.

A row holds pieces of documents, without a copy. The arrays of many rows are made at
once.
"""

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from aioloader._base.blocks import Bad
from aioloader._order.permutation import pause
from aioloader.datasets._tokens.samples import IGNORED, Array, samples_of

Overlong: TypeAlias = Literal["split", "truncate", "drop"]
_MOST = np.iinfo(np.int64).max
# Documents that are packed between two chances for other threads to take the GIL.
_MOMENT = 1 << 10


class Document(NamedTuple):
    """A document, or a piece of one."""

    tokens: Array  # integers, shape (length,)
    mask: Array | None = None  # which tokens are to be predicted, bool; None: all

    def part(self, start: int, stop: int | None = None) -> "Document":
        """Return the tokens from ``start`` to before ``stop``, as views."""
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


class Row(NamedTuple):
    """One sample that is not made yet."""

    pieces: list[Document]  # its documents; what they lack is padding
    following: int = IGNORED  # the last token's label, if labels are shifted


def laid_out(
    rows: Sequence[Row], length: int, pad: int, *, shift: bool
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


# -- one document after the other ---------------------------------------------------


class Passed(NamedTuple):
    """What need not be read again once a row or a failure was passed on."""

    documents: int  # how many, of those that were needed until then
    offset: int = 0  # tokens of the next one that are not needed
    failed: int | None = None  # position of a failed one among those that are


class Concatenation:
    """Documents laid end to end, and cut into rows.

    The first ``offset`` tokens of the first document are left out.
    """

    def __init__(self, length: int, offset: int) -> None:
        self._length = length
        self._waiting: deque[Document | Bad] = deque()
        self._at = offset  # in the first waiting one
        # The open row, and the documents since its start that are no longer waiting.
        self._pieces: list[Document] = []
        self._room = length
        self._held = 0

    def add(self, documents: Iterable[Document | Bad]) -> None:
        self._waiting.extend(documents)

    def cut(self, limit: int) -> list[tuple[Row | Bad, Passed]]:
        """Return up to ``limit`` rows, and failures where the documents would be."""
        made: list[tuple[Row | Bad, Passed]] = []
        while self._waiting and len(made) < limit:
            document = self._waiting[0]
            if type(document) is Bad:
                made.append((document, self._failed()))
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
            row = Row(self._pieces, following)
            if stop < size:
                self._at = stop
            else:
                self._next()
            made.append((row, self._begin(self._at)))
        return made

    def last(self) -> list[tuple[Row | Bad, Passed]]:
        """Return the open row, if it has tokens."""
        return [(Row(self._pieces), self._begin(0))] if self._pieces else []

    @property
    def has_some(self) -> bool:
        """Whether the open row has tokens."""
        return bool(self._pieces)

    def lacking(self, rows: int) -> int:
        """Return how many tokens so many rows lack, if none is waiting."""
        return (rows - 1) * self._length + self._room

    def _failed(self) -> Passed:
        place = self._held
        self._next()
        return Passed(0, failed=place) if place else self._begin(0)

    def _next(self) -> None:
        """Turn to the next document."""
        self._waiting.popleft()
        self._held += 1
        self._at = 0

    def _begin(self, offset: int) -> Passed:
        """Begin a row; all documents before it may be forgotten."""
        passed = Passed(self._held, offset)
        self._pieces, self._room, self._held = [], self._length, 0
        return passed


# -- whole documents -------------------------------------------------------------------


def fitted(documents: Iterable[Document], length: int, overlong: Overlong) -> list[Row]:
    """Pack documents into rows by best fit, the longest first.

    Source: best fit decreasing (Johnson, "Near-Optimal Bin Packing Algorithms", 1973),
    for documents: Ding et al., "Fewer Truncations Improve Language Modeling" (2024).
    """
    pieces = [*chain.from_iterable(_cut(one, length, overlong) for one in documents)]
    sizes = [len(row.pieces[0].tokens) for row in pieces]
    rows: list[Row] = []
    for places in best_fit(sizes, length):
        row = pieces[places[0]]
        for place in places[1:]:
            row.pieces.extend(pieces[place].pieces)
        rows.append(row)
    return rows


def _cut(document: Document, length: int, overlong: Overlong) -> Iterable[Row]:
    """Return rows of one piece each."""
    size = len(document.tokens)
    if size <= length:
        return [Row([document])] if size else []
    if overlong == "drop":
        return []
    if overlong == "truncate":
        return [Row([document.part(0, length)])]
    return [
        Row(
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
