"""Combine several streams or map-style datasets into one with ``mix``, by weights."""

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
    """Mix streams, or map-style datasets, in proportion to their weights.

    The source of each sample is computed from its position in the order of all ranks
    and readers, not at random. Among the first ``n`` samples, for any ``n``, each
    source has its share to within 1.5 samples, until a source ends. Each reader gets
    about these shares, unless readers far outnumber the sum of the integer weights. Use
    ``repeat()`` to repeat a source. Failed samples count.

    A mixture of map-style datasets is a ``Subset`` of their concatenation. Each dataset
    is read from its start; a loader's ``shuffle`` permutes the mixture.

    Args:
        sources: Sources by name, or a list, in which their names are ``"0"``,
            ``"1"``... The ranks and readers of the first stream apply.
            ``loader.stats()`` shows the samples and passes of each stream.
        weights: Weights in the order of the sources, or by name; default: equal. Or
            stages, ``[(0, weights), (start, weights), ...]``; each applies from
            position ``start`` on. Decimals are exact, unless their integer ratio sums
            to more than ``2**40``; the ratio is then rounded to that sum.
        until: ``"all"``: when a source ends (for streams: within a reader), the others
            continue in their proportions until all have ended; ``"first"``: the mixture
            ends with the first source that ends.

    Raises:
        ValueError: If there are no sources, or two with equal names; if weights are not
            positive, or have other names; if stages do not ascend from 0; or if a
            stream sets other ranks or readers than the first one.
        TypeError: If sources are neither all streams nor all map-style datasets.
    """
    pairs = [*(sources.items() if isinstance(sources, Mapping) else enumerate(sources))]
    named: dict[str, Any] = {str(name): source for name, source in pairs}
    if len(named) < len(pairs):
        raise ValueError(
            f"sources have equal names: {[str(name) for name, _ in pairs]}"
        )
    if not named:
        raise ValueError("a mixture needs at least one stream or dataset, got none")
    if all(isinstance(source, Stream) for source in named.values()):
        return Mixture(named, weights, until)
    for name, source in named.items():
        is_map = hasattr(source, "__getitem__") and hasattr(source, "__len__")
        if isinstance(source, IterableDataset) or not is_map:
            raise TypeError(
                "sources must be all streams, or all map-style datasets (with "
                f"__getitem__ and __len__), but {name!r} is of {type(source).__name__}"
            )
    schedule = Schedule([*named], weights, until)
    datasets = [*named.values()]
    kind: type[ConcatDataset[Any]] = ConcatDataset
    if any(batch_getter(source) is not None for source in datasets):
        kind = _BatchesAsync if any(map(reads_async, datasets)) else _Batches
    return Subset(kind(datasets), MixedIndices([*map(len, datasets)], schedule))


class _Batches(ConcatDataset[Any]):
    """Concatenation that reads batches by ``__getitems__`` where a dataset has it."""

    def __getitems__(self, indices: list[int]) -> Any:
        samples: list[Any] = [None] * len(indices)
        for dataset, places, own in self._parts(indices):
            get = batch_getter(dataset)
            results = [dataset[index] for index in own] if get is None else get(own)
            for place, sample in zip(places, results, strict=True):
                samples[place] = sample
        return samples

    def _parts(self, indices: list[int]) -> Iterator[tuple[Any, list[int], list[int]]]:
        """Yield each dataset, its samples' places in the batch, and their indices."""
        parts: dict[int, tuple[list[int], list[int]]] = {}
        for place, index in enumerate(indices):
            number = bisect_right(self.cumulative_sizes, index)
            places, own = parts.setdefault(number, ([], []))
            places.append(place)
            own.append(index - (self.cumulative_sizes[number - 1] if number else 0))
        for number, part in parts.items():
            yield self.datasets[number], *part


class _BatchesAsync(_Batches):
    """``_Batches`` for async datasets; a batch's datasets are read concurrently."""

    async def __getitems__(self, indices: list[int]) -> list[Any]:
        samples: list[Any] = [None] * len(indices)

        async def read(dataset: Any, places: list[int], own: list[int]) -> None:
            get = batch_getter(dataset)
            pending = [dataset[index] for index in own] if get is None else get(own)
            results = await resolved(pending)
            for place, sample in zip(places, results, strict=True):
                samples[place] = sample

        await asyncio.gather(*(read(*part) for part in self._parts(indices)))
        return samples
