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
WAYS = tuple({**one, "way": way} for one in WORKERS for way in ("early", "late"))


def values() -> Any:
    return np.arange(23 * 6, dtype=np.float32).reshape(23, 6)


class Rows(Dataset[Any]):
    """Rows of what ``open_array`` opens: when it is made, or in the worker."""

    def __init__(self, open_array: Any, path: Path, way: str) -> None:
        self.open_array, self.path = open_array, path
        self.array = open_array(path) if way == "early" else None

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        if self.array is None:
            self.array = self.open_array(self.path)
        return torch.from_numpy(np.asarray(self.array[index]))


def open_hdf5(path: Path) -> Any:
    return h5py.File(path, "r")["rows"]


def open_zarr(path: Path) -> Any:
    return zarr.open_array(str(path), mode="r")


@cases.add(*WAYS)
def hdf5(kit: Kit, workers: int, way: str) -> Any:
    """Two epochs; the file stays open."""
    path = kit.folder / f"{workers}-{way}.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("rows", data=values(), chunks=(4, 6))
    data = Rows(open_hdf5, path, way)
    loader = kit.loader(data, 4, shuffle=True, num_workers=workers)
    found = [[plain(batch) for batch in loader] for _ in range(2)]
    return [found, plain(data[5])]


@cases.add(*WORKERS)
def an_open_file_itself(kit: Kit, workers: int) -> Any:
    """An ``h5py.Dataset`` is a map-style dataset; its file stays open."""
    path = kit.folder / f"itself-{workers}.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("rows", data=values())
    with h5py.File(path, "r") as file:
        rows = file["rows"]
        found = [plain(b) for b in kit.loader(rows, 4, num_workers=workers)]
        return [found, plain(rows[2])]


@cases.add({"workers": 0, "way": "early"}, {"workers": 0, "way": "late"})
def zarr_arrays(kit: Kit, workers: int, way: str) -> Any:
    """Chunks of an array; zarr's own event loop does not survive a fork."""
    path = kit.folder / f"{workers}-{way}.zarr"
    array = zarr.create_array(str(path), shape=(23, 6), chunks=(4, 6), dtype="f4")
    array[:] = values()
    data = Rows(open_zarr, path, way)
    loader = kit.loader(data, 4, shuffle=True, num_workers=workers)
    return [[plain(batch) for batch in loader] for _ in range(2)]


@cases.add({"workers": 2, "way": "late"})
def zarr_from_a_clean_process(kit: Kit, workers: int, way: str) -> Any:
    """Opened in workers that inherit nothing."""
    path = kit.folder / f"clean-{workers}-{way}.zarr"
    array = zarr.create_array(str(path), shape=(23, 6), chunks=(4, 6), dtype="f4")
    array[:] = values()
    loader = kit.loader(
        Rows(open_zarr, path, way),
        4,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context="forkserver",
    )
    return [plain(batch) for batch in loader]


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
    """Its pipeline, over shards that it deals to workers itself; twice."""
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


@cases.add(*WORKERS)
def pandas(kit: Kit, workers: int) -> Any:
    """Mixed columns, and a group per worker."""
    frame = pd.DataFrame(
        {
            "x": np.arange(23),
            "y": np.linspace(0, 1, 23),
            "name": [f"row {index}" for index in range(23)],
        }
    )
    loader = kit.loader(Frame(frame), 4, shuffle=True, num_workers=workers)
    return [[plain(batch) for batch in loader] for _ in range(2)]


def which_worker(_worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    data: Any = info.dataset
    data.frame = data.frame.assign(name=f"worker {info.id}")


@cases.add({"workers": 2})
def pandas_set_up_by_workers(kit: Kit, workers: int) -> Any:
    """An init function changes the worker's dataset: batches come in torch's turns."""
    frame = pd.DataFrame({"x": range(23), "y": 0.5, "name": "none"})
    data = Frame(frame)
    loader = kit.cls(data, 4, num_workers=workers, worker_init_fn=which_worker)
    return [plain(batch) for batch in loader]
