"""Where samples come from: files on disk and objects in a store.

A dataset here is map-style with an ``async def __getitem__`` that returns the bytes of
one sample, so the loader keeps ``concurrency`` reads in flight. Importing this package
imports no optional dependency; ``ObjectDataset`` asks for obstore when it is made.
"""

from aioloader.datasets.files import FileDataset
from aioloader.datasets.objects import ObjectDataset

__all__ = ["FileDataset", "ObjectDataset"]
