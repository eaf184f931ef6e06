"""Read chunks of a zarr array through zarr's asyncio API, many at a time.

Run it with ``python examples/zarr_arrays.py``, which writes the array first.
"""

import asyncio
import tempfile
from typing import Any

import numpy as np
import torch
import zarr
from zarr.api import asynchronous

from aioloader import DataLoader


class ZarrDataset:
    """Map-style: sample ``i`` is ``array[i]``; each read is a coroutine."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._length = zarr.open_array(path, mode="r").shape[0]
        self._opened: dict[Any, asyncio.Task[Any]] = {}  # per event loop

    def __len__(self) -> int:
        return self._length

    async def __getitem__(self, index: int) -> torch.Tensor:
        loop = asyncio.get_running_loop()
        if loop not in self._opened:
            opening = asynchronous.open_array(store=self.path, mode="r")
            self._opened[loop] = asyncio.ensure_future(opening)
        array = await self._opened[loop]
        return torch.from_numpy(np.asarray(await array.getitem(index)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}}  # each worker opens its own


def main() -> None:
    """Write an array of 256 small images, and read it shuffled."""
    with tempfile.TemporaryDirectory() as folder:
        shape, chunks = (256, 3, 8, 8), (1, 3, 8, 8)
        array = zarr.create_array(folder, shape=shape, chunks=chunks, dtype="f4")
        array[:] = np.arange(256, dtype="f4").reshape(-1, 1, 1, 1)
        dataset = ZarrDataset(folder)
        with DataLoader[Any](dataset, batch_size=32, shuffle=True) as loader:
            total = sum(int(batch[:, 0, 0, 0].sum()) for batch in loader)
    print(f"{len(dataset)} samples of a zarr array, which add up to {total:,}")


if __name__ == "__main__":
    main()
