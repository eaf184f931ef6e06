"""A dataset that guards its cache by a lock, and another that counts under one."""

import threading

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset


class Guarded(Dataset):
    def __init__(self, n):
        self.n = n
        self.lock = threading.Lock()
        self.ready = threading.Condition()
        self.cache = {}

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        with self.lock, self.ready:
            if index not in self.cache:
                self.cache[index] = torch.arange(index, index + 3)
            return self.cache[index]


dataset = Guarded(10)
for epoch in range(2):
    for batch in DataLoader(dataset, batch_size=3, num_workers=2):
        print(epoch, batch.tolist())
print(len(dataset.cache))
