"""The contenders of the remote benchmarks, each as its users would best write it.

A feed is made once per process and yields uint8 batches of ``[64, 102400]``. torch's
feeds never touch obstore in the parent process, because it does not survive a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import urllib3
import uvloop
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from remote import BATCH, OBJECT_BYTES, Batches, stack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

    from remote import Feed, MakeFeed

# torch advises against more workers than cores; the workers here only wait
warnings.filterwarnings("ignore", message="This DataLoader will create")

KEYS = 10_000


class Window(Sampler[int]):
    """The first ``count`` objects; a loader keeps it from epoch to epoch."""

    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def make_store(url: str) -> Any:
    from obstore.store import HTTPStore  # noqa: PLC0415

    return HTTPStore(url, client_options={"allow_http": True})


class Asynchronous:
    """Exposes only the asynchronous interface of a loader."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __aiter__(self) -> AsyncIterator[torch.Tensor]:
        batches: AsyncIterator[torch.Tensor] = aiter(self._loader)
        return batches


def name_of(index: int) -> str:
    """Name an object; a listing has such names in the order of their numbers."""
    return f"{index:05}"


def object_dataset(
    url: str, size: int, count: int, *, listed: bool, store: Any = None
) -> Any:
    """Make the dataset that users import; ``listed``: it knows the sizes."""
    from aioloader.datasets import ObjectDataset  # noqa: PLC0415
    from aioloader.datasets._stores.listing import Listing  # noqa: PLC0415

    found = {name_of(index): size for index in range(count)}
    keys = Listing(found) if listed else found
    return ObjectDataset(store or make_store(url), keys=keys)


def as_array(body: Any) -> Any:
    """Look at a body as bytes; the loader's own collate does the copy."""
    return np.frombuffer(body, dtype=np.uint8)


def aioloader_feed(
    concurrency: int,
    *,
    asynchronous: bool = True,
    listed: bool = False,
    prefetch_factor: int | None = None,
) -> MakeFeed:
    """Make the feed of this package.

    Args:
        concurrency: GETs in flight.
        asynchronous: Consume it with ``async for``; else with ``for``.
        listed: Give ``ObjectDataset`` the sizes, as ``discover`` finds them (the server
            lists nothing); it reads by range then, as the peers do. Else it gets keys.
        prefetch_factor: Batches in flight; None lets the loader choose.
    """

    @contextlib.contextmanager
    def make(url: str) -> Iterator[Feed]:
        import aioloader  # noqa: PLC0415

        window = Window()
        loader: Any = aioloader.DataLoader(
            object_dataset(url, OBJECT_BYTES, KEYS, listed=listed),
            BATCH,
            sampler=window,
            transform=as_array,
            prefetch_factor=prefetch_factor,
            concurrency=concurrency,
        )

        def feed(count: int) -> Batches:
            window.count = count
            return Asynchronous(loader) if asynchronous else loader

        with contextlib.closing(loader):
            yield feed

    return make


class PooledObjects(Dataset[torch.Tensor]):
    """One GET at a time through a pooled client, one pool per worker."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._pool: urllib3.HTTPConnectionPool | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._pool is None:
            self._pool = urllib3.connection_from_url(self.url)
        body = self._pool.request("GET", f"/{index}").data
        return torch.frombuffer(body, dtype=torch.uint8)


class GatheredObjects(Dataset[torch.Tensor]):
    """A whole batch of GETs at once, on an event loop inside the worker."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._runner: asyncio.Runner | None = None

    async def _read(self, index: int) -> torch.Tensor:
        body = await self._obstore.get_range_async(
            self._store, str(index), start=0, length=OBJECT_BYTES
        )
        return torch.frombuffer(body, dtype=torch.uint8)

    async def _gather(self, indices: list[int]) -> list[torch.Tensor]:
        return await asyncio.gather(*map(self._read, indices))

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        if self._runner is None:
            import obstore  # noqa: PLC0415

            self._obstore = obstore
            self._store = make_store(self.url)
            self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        return self._runner.run(self._gather(indices))


def torch_feed(dataset: type[Dataset[torch.Tensor]], workers: int) -> MakeFeed:
    """Make torch's feed: persistent workers that stack into shared memory."""

    @contextlib.contextmanager
    def make(url: str) -> Iterator[Feed]:
        window = Window()
        loader: DataLoader[torch.Tensor] = DataLoader(
            dataset(url),  # type: ignore[call-arg]
            BATCH,
            sampler=window,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=default_collate,
        )

        def feed(count: int) -> Batches:
            window.count = count
            return loader

        yield feed

    return make


class AsyncRange:
    """An asynchronous source: SPDL hands items of a sync one across threads."""

    def __init__(self, count: int) -> None:
        self._count = count

    async def __aiter__(self) -> AsyncIterator[int]:
        for index in range(self._count):
            yield index


@dataclass(frozen=True)
class Spdl:
    """Settings of an SPDL pipeline; ``lean`` turns all optional features off.

    A lean one runs on uvloop, without task hooks and queue statistics, with an
    asynchronous source and a thread queue at its end. ``whole`` makes the item a
    batch: one task gathers 64 GETs, and ``concurrency`` counts batches. ``recycled``
    stacks into a ring of tensors, which a consumer must not keep.
    """

    concurrency: int
    lean: bool = True
    whole: bool = False
    ordered: bool = False
    recycled: bool = False

    @contextlib.contextmanager
    def __call__(self, url: str) -> Iterator[Feed]:
        """Make the feed; a pipeline serves one epoch and is built for each."""
        if self.lean:
            asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
        store = make_store(url)
        collate = Ring() if self.recycled else stack

        def feed(count: int) -> Batches:
            return self._batches(self._build(store, collate, count))

        yield feed

    @staticmethod
    def _batches(pipeline: Any) -> Iterator[torch.Tensor]:
        with pipeline.auto_stop():
            yield from pipeline

    def _build(self, store: Any, collate: Any, count: int) -> Any:
        import obstore  # noqa: PLC0415
        from spdl.pipeline import AsyncQueue, PipelineBuilder  # noqa: PLC0415

        async def read(index: int) -> Any:
            return await obstore.get_range_async(
                store, str(index), start=0, length=OBJECT_BYTES
            )

        async def gather(indices: Iterable[int]) -> list[Any]:
            return await asyncio.gather(*map(read, indices))

        builder: Any = PipelineBuilder()
        order = "input" if self.ordered else "completion"
        if self.whole:
            builder.add_source(chunks(count))
            builder.pipe(gather, concurrency=self.concurrency, output_order=order)
        else:
            builder.add_source(AsyncRange(count) if self.lean else range(count))
            builder.pipe(read, concurrency=self.concurrency, output_order=order)
            builder.aggregate(BATCH)
        builder.pipe(collate, output_order=order).add_sink(4)
        lean = {
            "task_hook_factory": no_hooks,
            "queue_class": AsyncQueue,
            "use_thread_output_queue": True,
        }
        return builder.build(num_threads=2, **(lean if self.lean else {}))


class Ring:
    """Stack into ten tensors in turn: more than are ever in use at once."""

    def __init__(self) -> None:
        self._batches = [
            torch.empty((BATCH, OBJECT_BYTES), dtype=torch.uint8) for _ in range(10)
        ]

    def __call__(self, bodies: Sequence[Any]) -> torch.Tensor:
        """Stack into the tensor that was used longest ago."""
        self._batches.append(self._batches.pop(0))
        return stack(bodies, self._batches[-1][: len(bodies)])


def spdl_settings() -> dict[str, Spdl]:
    """Return the names of the settings tried, items first, then whole batches."""
    items = {
        f"{kind}{' ordered' * ordered} {n}": Spdl(n, kind == "lean", ordered=ordered)
        for kind in ("plain", "lean")
        for n in (128, 256)
        for ordered in (False, True)
    }
    whole = {
        f"lean batches{' ordered' * ordered} {n}": Spdl(n, whole=True, ordered=ordered)
        for n in (2, 3, 4, 6, 8)
        for ordered in (False, True)
    }
    recycled = {
        f"{name} recycled": replace(setting, recycled=True)
        for name, setting in (items | whole).items()
        if setting.lean
    }
    return items | whole | recycled


def chunks(count: int) -> list[list[int]]:
    """Split the indices of an epoch into batches."""
    indices = iter(range(count))
    return list(iter(lambda: list(islice(indices, BATCH)), []))


def no_hooks(_: object) -> list[Any]:
    return []
