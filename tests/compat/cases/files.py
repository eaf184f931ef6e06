"""Formats of files: HDF5, zarr, tar shards (WebDataset), pandas."""

import io
import tarfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import torch
import webdataset as wds
import zarr
from torch.utils.data import Dataset, get_worker_info

from compat.kit import WORKERS, Cases, Kit, plain

cases = Cases()


def values() -> Any:
    return np.arange(23 * 6, dtype=np.float32).reshape(23, 6)


class Rows(Dataset[Any]):
    """Rows of an array that is opened in the constructor, or in the worker."""

    def __init__(self, path: Path, way: str) -> None:
        self.path = path
        self.array = self.opened() if way == "early" else None

    def opened(self) -> Any:
        return zarr.open_array(str(self.path), mode="r")

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        if self.array is None:
            self.array = self.opened()
        return torch.from_numpy(np.asarray(self.array[index]))


@cases.add(*WORKERS)
def an_open_file_itself(kit: Kit, workers: int) -> Any:
    """An ``h5py.Dataset`` is a map-style dataset; its file stays open."""
    path = kit.folder / f"itself-{workers}.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("rows", data=values())
    with h5py.File(path, "r") as file:
        rows = file["rows"]
        epoch = [plain(b) for b in kit.loader(rows, 4, num_workers=workers)]
        return [epoch, plain(rows[2])]


@cases.add(
    {"workers": 0, "way": "early"},
    {"workers": 0, "way": "late"},
    {"workers": 2, "way": "late", "start": "forkserver"},
)
def zarr_arrays(kit: Kit, workers: int, way: str, start: str | None = None) -> Any:
    """Chunks of an array; zarr's own event loop does not survive a fork."""
    path = kit.folder / f"{workers}-{way}.zarr"
    array = zarr.create_array(str(path), shape=(23, 6), chunks=(4, 6), dtype="f4")
    array[:] = values()
    how: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": start}
    loader = kit.loader(Rows(path, way), 4, shuffle=True, **how)
    epochs = 1 if start else 2  # a clean process imports this module
    return [[plain(batch) for batch in loader] for _ in range(epochs)]


def shards(folder: Path, count: int = 4) -> list[str]:
    paths = []
    for shard in range(count):
        path = folder / f"shard-{shard}.tar"
        with tarfile.open(path, "w") as archive:
            for number in range(5):
                for ending, data in (
                    ("cls", str(shard * 5 + number).encode()),
                    ("txt", f"sample {shard}-{number}".encode()),
                ):
                    member = tarfile.TarInfo(f"{shard}-{number}.{ending}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        paths.append(str(path))
    return paths


def to_dict(pair: Any) -> dict[str, Any]:
    number, text = pair
    return {"x": number, "text": text}


@cases.add(*WORKERS)
def webdataset(kit: Kit, workers: int) -> Any:
    """Two epochs of its pipeline, which splits the shards among workers itself."""
    paths = shards(kit.folder)
    data = wds.WebDataset(paths, shardshuffle=False, empty_check=False)
    data = data.decode().to_tuple("cls", "txt").map(to_dict)
    loader = kit.loader(data, 3, num_workers=workers)
    return [[plain(batch) for batch in loader] for _ in range(2)]


@cases.add(*WORKERS)
def webdataset_in_batches_of_its_own(kit: Kit, workers: int) -> Any:
    """``batched`` in the pipeline, and ``batch_size=None``, as its authors advise."""
    data = wds.WebDataset(shards(kit.folder), shardshuffle=False)
    data = data.decode().to_tuple("cls", "txt").batched(3)
    loader = kit.cls(data, batch_size=None, num_workers=workers)
    return [plain(batch) for batch in loader]


class Frame(Dataset[Any]):
    """Rows of a DataFrame as dicts."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self.frame = frame

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, index: int) -> Any:
        row = self.frame.iloc[index]
        return {"x": row["x"], "y": row["y"], "name": row["name"]}


def which_worker(_worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    data: Any = info.dataset
    data.frame = data.frame.assign(name=f"worker {info.id}")


@cases.add({"workers": 2})
def pandas(kit: Kit, workers: int) -> Any:
    """An init function changes the worker's dataset; workers take turns as in torch."""
    frame = pd.DataFrame({"x": range(23), "y": 0.5, "name": "none"})
    data = Frame(frame)
    loader = kit.cls(data, 4, num_workers=workers, worker_init_fn=which_worker)
    return [plain(batch) for batch in loader]
