"""Rows of an HDF5 file, opened in the constructor, and at the first read."""

import h5py
import numpy as np
import torch
from skimage import data
from torch.utils.data import DataLoader
from torch.utils.data import Dataset

with h5py.File("pictures.h5", "w") as file:
    picture = data.astronaut()
    tiles = picture.reshape(8, 64, 8, 64, 3).swapaxes(1, 2).reshape(64, 64, 64, 3)
    file.create_dataset("tiles", data=tiles, chunks=(4, 64, 64, 3), compression="gzip")
    file["labels"] = np.arange(64) % 7
    file.attrs["name"] = "astronaut"


class Eager(Dataset):
    def __init__(self, path):
        self.file = h5py.File(path, "r")

    def __len__(self):
        return len(self.file["tiles"])

    def __getitem__(self, index):
        return torch.from_numpy(self.file["tiles"][index]), int(
            self.file["labels"][index]
        )


class Lazy(Eager):
    def __init__(self, path):
        self.path = path
        self.handle = None

    @property
    def file(self):
        if self.handle is None:
            self.handle = h5py.File(self.path, "r")
        return self.handle


for make in (Eager, Lazy):
    dataset = make("pictures.h5")
    loader = DataLoader(dataset, batch_size=16, num_workers=2)
    for epoch in range(2):
        for tiles, labels in loader:
            print(epoch, tiles.shape, tiles.long().sum().item(), labels.tolist())
    if make is Eager:
        print(bool(dataset.file), dataset.file.attrs["name"], dataset.file["labels"][3])
