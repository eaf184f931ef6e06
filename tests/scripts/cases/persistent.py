"""Persistent workers keep the dataset of the first epoch, and what they cached."""

import os

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset

torch.manual_seed(5)


class Cached(Dataset):
    def __init__(self):
        self.offset = 0
        self.reads = 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.reads += 1
        return index + self.offset, self.reads, os.getpid(), torch.rand(1)


dataset = Cached()
loader = DataLoader(
    dataset, batch_size=2, num_workers=2, persistent_workers=True, shuffle=True
)
pids = set()
for epoch in range(3):
    for values, reads, who, noise in loader:
        print(epoch, values.tolist(), reads.tolist(), noise.flatten().tolist())
        pids.update(who.tolist())
    dataset.offset += 100  # not seen by workers that live on
print(len(pids), dataset.reads)
