"""Several ranks in threads of one process, which agree through a store on their end."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed

from aioloader import DataLoader

dist: Any = torch.distributed


def a_store() -> Any:
    """Return a store that workers can reach too."""
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False
    )


def loader_of(
    stream: Any, store: Any, rank: int, ranks: int, **options: Any
) -> "DataLoader[Any]":
    asked: Any = {"collate_fn": list, "rank": rank, "world_size": ranks, **options}
    return DataLoader(stream.agree(store, timeout=30), **asked)


def side_by_side(job: Any, ranks: int) -> list[Any]:
    """Return what a function of the rank gives, called for all ranks at once."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(job, range(ranks)))


def read_all(stream: Any, ranks: int, **options: Any) -> list[list[Any]]:
    store = a_store() if options.get("num_workers") else dist.HashStore()

    def read(rank: int) -> list[Any]:
        with loader_of(stream, store, rank, ranks, **options) as loader:
            return list(loader)

    return side_by_side(read, ranks)


def masked(batches: list[Any]) -> list[Any]:
    """Return the samples of padded batches that are no padding."""
    return [
        sample
        for batch, mask in batches
        for sample, is_kept in zip(batch, mask.tolist(), strict=True)
        if is_kept
    ]
