"""Mixtures, which assign each position of an order to a source by weights.

The source follows from the position by integer arithmetic, without random numbers.
After any number of positions, each source has its share, to within 1.5 samples. Each of
several readers has about the same shares, unless readers far outnumber the weights.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from operator import index, itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from aioloader._order.permutation import GOLDEN_RATIO
from aioloader._order.ranks import ReaderShare
from aioloader._order.stream_states import checksum

if TYPE_CHECKING:
    from numpy.typing import NDArray

Until: TypeAlias = Literal["all", "first"]
IntegerArray: TypeAlias = "NDArray[np.integer[Any]]"
# Weights in the order of the sources, or by name; or stages, each with its start.
Weighting: TypeAlias = Sequence[float] | Mapping[str, float]
Weights: TypeAlias = Weighting | Sequence[tuple[int, Weighting]]
_MAX_WEIGHT_SUM = 1 << 40
_MAX_DISTANCE = 3  # of a source's count from its share, in half samples
# Limits on the samples planned at once, and on the size of the arrays for this.
_MAX_PLANNED = 1024
_MAX_SIZE = 1 << 15


class Proportions:
    """The division of positions between sources by weight, in a binary tree.

    Of a node's first ``n`` positions, one child gets ``floor(n * f + 1/2)``, where
    ``f`` is that child's fraction of the weight. So a source's count differs from its
    share by at most half the sum of its fractions of the nodes above it, except the
    root. Nodes are joined to keep this sum small.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.count = len(weights)
        self._weights = [*weights]  # then those of inner nodes; the root is last
        self._splits: list[tuple[int, int, int]] = []  # nodes, from the root down
        # A node: its weight, its number, and each source's sum of fractions.
        nodes: list[tuple[int, int, dict[int, float]]]
        nodes = [(weight, leaf, {leaf: 0.0}) for leaf, weight in enumerate(weights)]
        while len(nodes) > 1:
            nodes.sort(key=itemgetter(0))
            joined = []
            for place, pair in enumerate(pairwise(nodes)):
                weight = pair[0][0] + pair[1][0]
                sums = {
                    source: total + weights[source] / below
                    for below, _, totals in pair
                    for source, total in totals.items()
                }
                worst = max(sums[source] + weights[source] / weight for source in sums)
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
        """Return each source's count among the first ``first + more`` positions.

        Each item is the count for ``first``, and an array of what ``more`` adds.
        """
        counts = {len(self._weights) - 1: (first, more)}
        for node, left, right in self._splits:
            whole, added = counts.pop(node)
            part, of = self._weights[left], self._weights[node]
            its, rest = divmod(whole * part + of // 2, of)
            its_added = (added * part + rest) // of
            counts[left] = its, its_added
            counts[right] = whole - its, added - its_added
        return [counts[source] for source in range(self.count)]

    def reach(self, source: int, count: int) -> int:
        """Return the fewest positions that yield ``count`` samples of ``source``."""
        most = (count + _MAX_DISTANCE) * self._total // self._weights[source] + 1
        return bisect_left(
            range(most), count, key=lambda first: self.counts(first)[source][0]
        )

    def sources(self, share: ReaderShare, first: int, most: int) -> IntegerArray:
        """Return the sources of a reader's next samples, at most ``most``.

        ``first``: the first round. Readers change positions in each round: otherwise
        two readers of two equal sources would each read only one source.
        """
        readers = share.readers
        count = max(1, min(most, _MAX_PLANNED, _MAX_SIZE // (self.count * readers)))
        offsets = np.arange(count) * readers
        if readers > 1:
            key = readers, first, count
            if (starts := self._planned.get(key)) is None:
                starts = self._starts(*key)
                self._planned = {key: starts}  # the other readers need it next
            offsets += (starts + share.reader) % readers
        before, after = (
            np.stack([added for _, added in self.counts(first * readers, more)])
            for more in (offsets, offsets + 1)
        )
        sources: IntegerArray = (after - before).argmax(axis=0)
        return sources

    def _starts(self, readers: int, first: int, count: int) -> IntegerArray:
        """Return reader 0's position in each round, chosen to keep all shares.

        A round that starts at ``x`` has the positions from ``x`` on, then those before
        ``x``. This shifts a source's distance from its share by the distance at ``x``.
        """
        begin, total = first * readers, self._total
        more = np.arange(count)[:, None] * readers + np.arange(readers + 1)
        counts = zip(self._weights, self.counts(begin, more), strict=False)
        # Distances times the sum of weights, by source, round, and position in it.
        distances = np.stack(
            [
                (its * total - weight * begin) + (added * total - weight * more)
                for weight, (its, added) in counts
            ]
        )
        fits = np.ones((count, readers), bool)
        for far in (distances, -distances):
            upto = np.maximum.accumulate(far, axis=-1)
            since = np.maximum.accumulate(far[..., ::-1], axis=-1)[..., ::-1]
            ahead = np.maximum(far[..., :1] + since, far[..., -1:] + upto) - far
            fits &= (2 * ahead[..., :-1] <= _MAX_DISTANCE * total).all(axis=0)
        # Choose evenly from the starts that fit; 0 always does.
        golden = np.uint64(GOLDEN_RATIO)
        numbers = np.arange(first, first + count, dtype=np.uint64) * golden
        spread = (numbers >> np.uint64(32)).astype(np.int64)
        chosen = (spread * fits.sum(axis=1)) >> 32
        starts: IntegerArray = (fits.cumsum(axis=1) > chosen[:, None]).argmax(axis=1)
        return starts


class Stage(NamedTuple):
    """A range of positions with the same weights and the same sources."""

    start: int  # the position from which shares are counted
    stop: int | None
    sources: list[int]  # those that still have samples
    proportions: Proportions  # of these sources


class Schedule:
    """The weights of the sources at each position, and when the mixture ends.

    Raises:
        ValueError: If weights are not positive or have wrong names, if stages do not
            ascend from 0, or if ``until`` is unknown.
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
        if is_staged and all(isinstance(stage, (tuple, list)) for stage in weights):
            given = [(index(start), stage) for start, stage in weights]
        else:
            given = [(0, weights)]
        starts = [start for start, _ in given]
        if starts[0] != 0 or starts != sorted({*starts}):
            raise ValueError(
                f"stages of weights must start at 0 and ascend, got {starts}"
            )
        self.stages = [(start, _exact(stage, names)) for start, stage in given]
        self._made: dict[tuple[int, ...], Stage] = {}

    def stage(self, position: int, ended: Collection[int]) -> Stage:
        """Return the stage at a position, given the sources that have ended."""
        number = bisect_right(self.stages, position, key=itemgetter(0)) - 1
        key = number, *ended
        if key not in self._made:
            start, weights = self.stages[number]
            later = self.stages[number + 1 : number + 2]
            left = [source for source in range(len(weights)) if source not in ended]
            proportions = Proportions([weights[source] for source in left])
            stop = later[0][0] if later else None
            self._made[key] = Stage(start, stop, left, proportions)
        return self._made[key]

    def sources(
        self, taken: int, share: ReaderShare, ended: Collection[int]
    ) -> IntegerArray:
        """Return the sources of a reader's next samples, after ``taken`` samples."""
        readers, most = share.readers, _MAX_PLANNED
        position = taken * readers + share.reader
        stage = self.stage(position, ended)
        if stage.stop is not None:
            most = -(-(stage.stop - position) // readers)
        first, reader = divmod(position - stage.start, readers)
        numbers = stage.proportions.sources(ReaderShare(reader, readers), first, most)
        # Integers of one or two bytes are sorted much faster.
        kind = np.min_scalar_type(len(self.stages[0][1]))
        sources: IntegerArray = np.array(stage.sources, kind)[numbers]
        return sources


def _exact(weights: Any, names: Sequence[str]) -> list[int]:
    """Return the weights as integers in the same ratios, by source.

    The ratios are exact, unless the integers' sum would exceed ``_MAX_WEIGHT_SUM``.
    """
    if isinstance(weights, Mapping):
        if weights.keys() != {*names}:
            raise ValueError(
                f"weights are of {[*weights]}, but the sources are {[*names]}"
            )
        weights = [weights[name] for name in names]
    try:
        exact = [Fraction(str(weight)) for weight in weights]
    except ValueError:  # not finite, or not numbers
        exact = []
    if len(exact) != len(names) or min(exact) <= 0:
        raise ValueError(
            f"weights must be {len(names)} positive numbers, got {[*weights]}"
        )
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    shared, total = math.gcd(*whole), sum(whole)
    if total <= _MAX_WEIGHT_SUM * shared:
        return [weight // shared for weight in whole]
    return [max(1, round(Fraction(n * _MAX_WEIGHT_SUM, total))) for n in whole]


class MixedIndices(Sequence[int]):
    """The order of a mixture of datasets, as indices of their concatenation."""

    def __init__(self, lengths: Sequence[int], schedule: Schedule) -> None:
        self._described = checksum([*lengths, schedule.stages, schedule.until])
        # Ranges in which no source ends: their start, their stage, and what to add to
        # each source's count to get an index.
        self._segments: list[tuple[int, Stage, list[int]]] = []
        start = 0
        nexts = list(accumulate(lengths, initial=0))
        ends, ended = nexts[1:], list[int]()
        while len(ended) < len(lengths):
            stage = schedule.stage(start, ended)
            sources, shares = stage.sources, stage.proportions
            counts = shares.counts(start - stage.start)
            pairs = zip(sources, counts, strict=True)
            shifts = [nexts[source] - its for source, (its, _) in pairs]
            self._segments.append((start, stage, shifts))
            # By source: the position that would need one sample more than it has.
            lacking = [
                shares.reach(place, ends[source] - shifts[place] + 1) - 1
                for place, source in enumerate(sources)
            ]
            start = stage.start + min(lacking)
            if is_cut := stage.stop is not None and start >= stage.stop:
                start = stage.stop
            for place, (its, _) in enumerate(shares.counts(start - stage.start)):
                nexts[sources[place]] = shifts[place] + its
            if not is_cut:
                ended = sorted([*ended, sources[lacking.index(min(lacking))]])
                if schedule.until == "first":
                    break
        self._length = start

    def described(self) -> dict[str, Any]:
        """Return, as a dict, the checksum of the settings that a load compares."""
        return {"mixture": self._described}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: Any) -> Any:
        """Return the index at a position; negative positions count from the end.

        Raises:
            IndexError: If the position is out of range.
        """
        position = range(self._length)[index(position)]
        segment = bisect_right(self._segments, position, key=itemgetter(0)) - 1
        _, stage, shifts = self._segments[segment]
        first, counts = position - stage.start, stage.proportions.counts
        each = zip(shifts, counts(first), counts(first + 1), strict=True)
        return next(shift + its for shift, (its, _), (then, _) in each if then > its)
