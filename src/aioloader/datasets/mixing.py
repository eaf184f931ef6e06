"""``mix``: several streams, or several map-style datasets, as one, by weights."""

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, overload

from torch.utils.data import ConcatDataset, IterableDataset, Subset

from aioloader._base.awaitables import resolved
from aioloader._order.mixture import MixedIndices, Schedule, Until, Weights
from aioloader.datasets.streams import Mixture, Stream
from aioloader.protocols import batch_getter, reads_async


class MapDataset(Protocol):
    """A map-style dataset; its ``__getitem__`` may be async."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


@overload
def mix(
    sources: Mapping[str, Stream[Any]] | Iterable[Stream[Any]],
    weights: Weights | None = None,
    until: Until = "all",
) -> Stream[Any]: ...


@overload
def mix(
    sources: Mapping[str, MapDataset] | Iterable[MapDataset],
    weights: Weights | None = None,
    until: Until = "all",
) -> Subset[Any]: ...


def mix(
    sources: Mapping[str, Any] | Iterable[Any],
    weights: Weights | None = None,
    until: Until = "all",
) -> Stream[Any] | Subset[Any]:
    """Return streams, or map-style datasets, as one, in proportion to their weights.

    The source of each position of the order (of all ranks and readers together) is
    computed from the position. It is not random: of any first ``n`` samples, each
    source has its share to 1.5 samples, until one ends. Each reader has about the same
    shares, unless there are many more readers than positions after which the weights
    repeat. Sources are repeated by ``repeat()``. A failed sample counts.

    A mixture of map-style datasets is a ``Subset`` of all of them in a row. Each is
    read from its start; a loader's ``shuffle`` permutes the whole.

    Args:
        sources: By name; those of a list are called ``"0"``, ``"1"``... Of streams,
            the ranks and readers of the first apply. ``loader.stats()`` shows the
            samples and passes of each stream.
        weights: In the order of the sources, or by name; default: equal. Or stages,
            ``[(0, weights), (start, weights), ...]``, each from its position
            ``start`` on. Decimals are exact, and ratios that need sums over ``2**40``
            are rounded to it.
        until: ``"all"``: when a source ends (of streams: in a reader), the others
            continue in their proportions, until each was read; ``"first"``: the mixture
            ends with the first source that ends.

    Raises:
        ValueError: If there are no sources, or two of one name; if weights are not
            positive, of other names, or in stages that do not ascend from 0; or if a
            stream other than the first has separate ranks or readers.
        TypeError: If sources are neither all streams nor all map-style datasets.
    """
    pairs = [*(sources.items() if isinstance(sources, Mapping) else enumerate(sources))]
    named: dict[str, Any] = {str(name): one for name, one in pairs}
    if len(named) < len(pairs):
        raise ValueError(
            f"sources have equal names: {[str(name) for name, _ in pairs]}"
        )
    if not named:
        raise ValueError("a mixture needs at least one stream or dataset, got none")
    if all(isinstance(one, Stream) for one in named.values()):
        return Mixture(named, weights, until)
    for name, one in named.items():
        is_map = hasattr(one, "__getitem__") and hasattr(one, "__len__")
        if isinstance(one, IterableDataset) or not is_map:
            raise TypeError(
                "sources must be all streams, or all map-style datasets (with "
                f"__getitem__ and __len__), but {name!r} is of {type(one).__name__}"
            )
    schedule = Schedule([*named], weights, until)
    datasets = [*named.values()]
    kind: type[ConcatDataset[Any]] = ConcatDataset
    if any(batch_getter(one) is not None for one in datasets):
        kind = _BatchesAsync if any(map(reads_async, datasets)) else _Batches
    return Subset(kind(datasets), MixedIndices([*map(len, datasets)], schedule))


class _Batches(ConcatDataset[Any]):
    """Datasets in a row; those that can, read their part of a batch at once."""

    def __getitems__(self, indices: list[int]) -> Any:
        samples: list[Any] = [None] * len(indices)
        for dataset, places, own in self._parts(indices):
            get = batch_getter(dataset)
            found = [dataset[one] for one in own] if get is None else get(own)
            for place, sample in zip(places, found, strict=True):
                samples[place] = sample
        return samples

    def _parts(self, indices: list[int]) -> Iterator[tuple[Any, list[int], list[int]]]:
        """Yield each dataset with the places and the indices of its samples."""
        parts: dict[int, tuple[list[int], list[int]]] = {}
        for place, index in enumerate(indices):
            number = bisect_right(self.cumulative_sizes, index)
            places, own = parts.setdefault(number, ([], []))
            places.append(place)
            own.append(index - (self.cumulative_sizes[number - 1] if number else 0))
        for number, part in parts.items():
            yield self.datasets[number], *part


class _BatchesAsync(_Batches):
    """The same, if one of them is async; all are read at the same time."""

    async def __getitems__(self, indices: list[int]) -> list[Any]:
        samples: list[Any] = [None] * len(indices)

        async def read(dataset: Any, places: list[int], own: list[int]) -> None:
            get = batch_getter(dataset)
            made = [dataset[one] for one in own] if get is None else get(own)
            found = await resolved(made)
            for place, sample in zip(places, found, strict=True):
                samples[place] = sample

        await asyncio.gather(*(read(*part) for part in self._parts(indices)))
        return samples
