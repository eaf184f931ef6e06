"""DLIO's readers, without the log message that dominates every loader's time.

DLIO 2.0.0 formats its whole map of samples into a debug message for each sample that it
reads: milliseconds where there are thousands of samples. All contenders use these.
"""

from __future__ import annotations

from typing import Any

from dlio_benchmark.reader.indexed_binary_reader import IndexedBinaryReader
from dlio_benchmark.reader.npz_reader import NPZReader


class QuietMap(dict[int, Any]):
    """A map of samples that takes no time to print."""

    def __repr__(self) -> str:
        return f"<{len(self)} samples>"


class VolumeReader(NPZReader):
    """Reads ``.npz`` files of one sample each."""

    def __init__(self, dataset_type: Any, thread_index: int, epoch: int) -> None:
        super().__init__(dataset_type, thread_index, epoch)
        self.global_index_map = QuietMap(self.global_index_map)


class PackedReader(IndexedBinaryReader):
    """Reads samples out of large files by an index of offsets."""

    def __init__(self, dataset_type: Any, thread_index: int, epoch: int) -> None:
        super().__init__(dataset_type, thread_index, epoch)
        self.global_index_map = QuietMap(self.global_index_map)
