"""Mixtures: the source of each position of an order, by weights. Pure arithmetic.

It is computed from the position, in integers, and nothing is drawn: after any number of
positions, each source has had its share of them, to 1.5 samples. If readers take turns
at the order, each of them has about the same shares, unless there are many more readers
than positions after which the weights repeat.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from operator import index, itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from aioloader._order.ranks import ReaderShare
from aioloader._order.stream_states import checksum

if TYPE_CHECKING:
    from numpy.typing import NDArray

Until: TypeAlias = Literal["all", "first"]
IntegerArray: TypeAlias = "NDArray[np.integer[Any]]"
# One for each source, or by name; or stages: from which position on they apply.
Weighting: TypeAlias = Sequence[float] | Mapping[str, float]
Weights: TypeAlias = Weighting | Sequence[tuple[int, Weighting]]
# The largest sum of weights.
_MOST = 1 << 40
# How far a source may be from its share, in half samples.
_BOUND = 3
# Most samples that are planned at once, and most numbers that this may take.
_COUNT = 1024
_NUMBERS = 1 << 15
# The golden ratio, whose multiples are spread evenly, modulo 1, in units of 2**-64.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Proportions:
    """Positions shared out to sources by weight, by a binary tree of splits.

    Of the first ``n`` positions of a node, one side has ``floor(n * f + 1/2)``, where
    ``f`` is its part of the weight. So the distance of a source from its share is at
    most half the sum of its parts of the nodes above it, the root aside. Nodes are
    joined to keep that small.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.count = len(weights)
        self._weights = [*weights]  # and those of inner nodes; the root is the last one
        self._splits: list[tuple[int, int, int]] = []  # nodes, from the root down
        # Each with the sums for its sources.
        nodes: list[tuple[int, int, dict[int, float]]]
        nodes = [(weight, at, {at: 0.0}) for at, weight in enumerate(weights)]
        while len(nodes) > 1:
            nodes.sort(key=itemgetter(0))
            joined = []
            for place, pair in enumerate(pairwise(nodes)):
                weight = pair[0][0] + pair[1][0]
                sums = {
                    at: found + weights[at] / its
                    for its, _, known in pair
                    for at, found in known.items()
                }
                worst = max(found + weights[at] / weight for at, found in sums.items())
                joined.append((worst, weight, place, sums))
            _, weight, place, sums = min(joined)
            node = len(self._weights)
            (_, left, _), (_, right, _) = nodes[place : place + 2]
            self._splits.insert(0, (node, left, right))
            self._weights.append(weight)
            nodes[place : place + 2] = [(weight, node, sums)]
        self._total = self._weights[-1]
        self._planned: dict[tuple[int, int, int], IntegerArray] = {}

    def counts(
        self, first: int, more: "IntegerArray | int" = 0
    ) -> list[tuple[int, Any]]:
        """Return how many of the ``first + more`` first positions each source has.

        Each is the number for ``first``, and an array of what ``more`` adds to it.
        """
        found = {len(self._weights) - 1: (first, more)}
        for node, left, right in self._splits:
            whole, added = found.pop(node)
            part, of = self._weights[left], self._weights[node]
            its, rest = divmod(whole * part + of // 2, of)
            its_added = (added * part + rest) // of
            found[left] = its, its_added
            found[right] = whole - its, added - its_added
        return [found[source] for source in range(self.count)]

    def reach(self, source: int, count: int) -> int:
        """Return the least number of positions of which ``source`` has ``count``."""
        most = (count + _BOUND) * self._total // self._weights[source] + 1
        return bisect_left(
            range(most), count, key=lambda first: self.counts(first)[source][0]
        )

    def sources(self, share: ReaderShare, first: int, most: int) -> IntegerArray:
        """Return the sources of a reader's samples from a round on: 1 to ``most``.

        Readers take turns, in rounds. If they had fixed places in a round, two readers
        of two equal sources would each read one of these only. So each round starts at
        another of its positions.
        """
        readers = share.readers
        count = max(1, min(most, _COUNT, _NUMBERS // (self.count * readers)))
        at = np.arange(count) * readers
        if readers > 1:
            key = readers, first, count
            if (starts := self._planned.get(key)) is None:
                starts = self._starts(*key)
                self._planned = {key: starts}  # the other readers need it next
            at += (starts + share.reader) % readers
        before, after = (
            np.stack([added for _, added in self.counts(first * readers, one)])
            for one in (at, at + 1)
        )
        found: IntegerArray = (after - before).argmax(axis=0)
        return found

    def _starts(self, readers: int, first: int, count: int) -> IntegerArray:
        """Return where rounds start, so that shares hold at each of their positions.

        A round that starts at ``x`` has the positions from there on, and then those
        before. The distances from the shares move by as much as there was at ``x``.
        """
        begin, total = first * readers, self._total
        at = np.arange(count)[:, None] * readers + np.arange(readers + 1)
        counts = zip(self._weights, self.counts(begin, at), strict=False)
        # Times the sum of weights; of each source, round, and position in it.
        far = np.stack(
            [
                (its * total - weight * begin) + (added * total - weight * at)
                for weight, (its, added) in counts
            ]
        )
        fits = np.ones((count, readers), bool)
        for one in (far, -far):
            upto = np.maximum.accumulate(one, axis=-1)
            since = np.maximum.accumulate(one[..., ::-1], axis=-1)[..., ::-1]
            ahead = np.maximum(one[..., :1] + since, one[..., -1:] + upto) - one
            fits &= (2 * ahead[..., :-1] <= _BOUND * total).all(axis=0)
        # One of those that fit, evenly: the first of them is 0, the round as it is.
        numbers = np.arange(first, first + count, dtype=np.uint64) * _GOLDEN
        spread = (numbers >> np.uint64(32)).astype(np.int64)
        chosen = (spread * fits.sum(axis=1)) >> 32
        starts: IntegerArray = (fits.cumsum(axis=1) > chosen[:, None]).argmax(axis=1)
        return starts


class Stage(NamedTuple):
    """Positions in which the weights and the sources that have samples are the same."""

    start: int  # the position that counts as the first one
    stop: int | None
    sources: list[int]  # those that have samples
    proportions: Proportions  # of these


class Schedule:
    """The weights of sources, which may change at given positions, and the end.

    Raises:
        ValueError: If weights are not positive, of other names, or not in stages that
            ascend from 0; or if ``until`` is unknown.
    """

    def __init__(self, names: Sequence[str], weights: Any, until: Until) -> None:
        if until not in {"all", "first"}:
            raise ValueError(f"until must be 'all' or 'first', got {until!r}")
        self.until = until
        if weights is None:
            weights = [1] * len(names)
        if not isinstance(weights, Mapping):
            weights = [*weights]
        is_staged = isinstance(weights, list) and bool(weights)
        if is_staged and all(isinstance(one, (tuple, list)) for one in weights):
            given = [(index(start), one) for start, one in weights]
        else:
            given = [(0, weights)]
        starts = [start for start, _ in given]
        if starts[0] != 0 or any(one >= other for one, other in pairwise(starts)):
            raise ValueError(
                f"stages of weights must start at 0 and ascend, got {starts}"
            )
        self.stages = [(start, _exact(one, names)) for start, one in given]
        self._made: dict[tuple[int, ...], Stage] = {}

    def stage(self, position: int, ended: Collection[int]) -> Stage:
        """Return the stage of a position, once some sources have ended."""
        at = bisect_right(self.stages, position, key=lambda one: one[0]) - 1
        key = at, *ended
        if key not in self._made:
            start, weights = self.stages[at]
            later = self.stages[at + 1 : at + 2]
            left = [one for one in range(len(weights)) if one not in ended]
            proportions = Proportions([weights[one] for one in left])
            stop = later[0][0] if later else None
            self._made[key] = Stage(start, stop, left, proportions)
        return self._made[key]

    def sources(
        self, at: int, share: ReaderShare, ended: Collection[int]
    ) -> IntegerArray:
        """Return the sources of a reader's next samples, after ``at`` of them."""
        readers, most = share.readers, _COUNT
        position = at * readers + share.reader
        stage = self.stage(position, ended)
        if stage.stop is not None:
            most = -(-(stage.stop - position) // readers)
        first, reader = divmod(position - stage.start, readers)
        found = stage.proportions.sources(ReaderShare(reader, readers), first, most)
        # Integers of one or two bytes are sorted much faster.
        kind = np.min_scalar_type(len(self.stages[0][1]))
        sources: IntegerArray = np.array(stage.sources, kind)[found]
        return sources


def _exact(weights: Any, names: Sequence[str]) -> list[int]:
    """Return weights as integers with the same ratios.

    Decimals are exact. Larger sums than ``_MOST`` are rounded to it.
    """
    if isinstance(weights, Mapping):
        if weights.keys() != {*names}:
            raise ValueError(
                f"weights are of {[*weights]}, but the sources are {[*names]}"
            )
        weights = [weights[name] for name in names]
    try:
        found = [Fraction(str(one)) for one in weights]
    except ValueError:  # not finite, or no numbers
        found = []
    if len(found) != len(names) or min(found) <= 0:
        raise ValueError(
            f"weights must be {len(names)} positive numbers, got {[*weights]}"
        )
    common = math.lcm(*(one.denominator for one in found))
    whole = [int(one * common) for one in found]
    shared, total = math.gcd(*whole), sum(whole)
    if total <= _MOST * shared:
        return [one // shared for one in whole]
    return [max(1, round(Fraction(one * _MOST, total))) for one in whole]


class MixedIndices(Sequence[int]):
    """The order of a mixture of map-style datasets: indices of all, in a row."""

    def __init__(self, lengths: Sequence[int], schedule: Schedule) -> None:
        self._described = checksum([*lengths, schedule.stages, schedule.until])
        # Of positions in which no source ends: the first one, their stage, and for each
        # source what leads from its count to an index.
        self._segments: list[tuple[int, Stage, list[int]]] = []
        at = 0
        nexts = list(accumulate(lengths, initial=0))
        ends, ended = nexts[1:], list[int]()
        while len(ended) < len(lengths):
            stage = schedule.stage(at, ended)
            sources, shares = stage.sources, stage.proportions
            counts = shares.counts(at - stage.start)
            shifts = [
                nexts[one] - its for one, (its, _) in zip(sources, counts, strict=True)
            ]
            self._segments.append((at, stage, shifts))
            # Where each would have a sample more than there are, and the first of them.
            lacking = [
                shares.reach(place, ends[one] - shifts[place] + 1) - 1
                for place, one in enumerate(sources)
            ]
            at = stage.start + min(lacking)
            if is_cut := stage.stop is not None and at >= stage.stop:
                at = stage.stop
            for place, (its, _) in enumerate(shares.counts(at - stage.start)):
                nexts[sources[place]] = shifts[place] + its
            if not is_cut:
                ended = sorted([*ended, sources[lacking.index(min(lacking))]])
                if schedule.until == "first":
                    break
        self._length = at

    def described(self) -> dict[str, Any]:
        """Return what tells it from other mixtures, for a state."""
        return {"mixture": self._described}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: Any) -> Any:
        """Return the index at a position; negative ones count from the end.

        Raises:
            IndexError: If it is out of range.
        """
        at = range(self._length)[index(position)]
        place = bisect_right(self._segments, at, key=itemgetter(0)) - 1
        _, stage, shifts = self._segments[place]
        first, counts = at - stage.start, stage.proportions.counts
        each = zip(shifts, counts(first), counts(first + 1), strict=True)
        return next(shift + its for shift, (its, _), (then, _) in each if then > its)
