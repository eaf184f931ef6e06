"""Read rows of a Lance table: a whole batch with one call, in a thread.

Run it with ``python examples/lance_rows.py``, which writes the table first.
"""

import tempfile
from collections.abc import Sequence
from typing import Any

import lance
import pyarrow as pa
import torch

from aioloader import DataLoader


class LanceDataset:
    """Map-style; ``__getitems__`` reads the rows of a batch at once."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._table: Any = None
        self._length = self._open().count_rows()

    def _open(self) -> Any:
        if self._table is None:
            self._table = lance.dataset(self.path)
        return self._table

    def __len__(self) -> int:
        return int(self._length)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._open().take(list(indices)).to_pylist()
        return rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None}  # each worker opens its own


def main() -> None:
    """Write a table of 256 rows, and read it shuffled."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/rows.lance"
        lance.write_dataset(pa.table({"x": range(256), "y": [0.5] * 256}), path)
        dataset: Any = LanceDataset(path)
        with DataLoader[Any](dataset, batch_size=32, shuffle=True) as loader:
            total = sum(int(torch.sum(batch["x"])) for batch in loader)
    print(f"{len(dataset)} rows of a Lance table, which add up to {total:,}")


if __name__ == "__main__":
    main()
