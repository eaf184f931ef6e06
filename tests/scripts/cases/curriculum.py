"""A curriculum: the script changes its dataset, and its globals, between epochs."""

import random

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset

random.seed(7)
DIFFICULTY = 0


class Problems(Dataset):
    def __init__(self):
        self.items = list(range(6))
        self.transform = None

    def grow(self, n):
        self.items += [random.randrange(100) for _ in range(n)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        item = self.items[index] * 10**DIFFICULTY
        return self.transform(item) if self.transform else item


problems = Problems()
loader = DataLoader(problems, batch_size=4, num_workers=2)
for epoch in range(4):
    print(epoch, [batch.tolist() for batch in loader])
    problems.grow(2)
    DIFFICULTY += 1
    if epoch == 1:
        problems.transform = lambda item: -item
    if epoch == 2:
        problems.items = problems.items[::-1]
        del problems.items[5:]
print(len(loader), torch.tensor(list(loader.sampler)).tolist())
