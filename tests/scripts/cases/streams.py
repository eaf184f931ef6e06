"""Iterable datasets: each worker takes its part of the lines, or of the range."""

import this
from itertools import islice

import torch
from torch.utils.data import DataLoader
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info

TEXT = "".join(this.d.get(letter, letter) for letter in this.s).splitlines()


class Lines(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return islice(TEXT, first, None, step)


class Range(IterableDataset):
    def __init__(self, start, end):
        self.start = start
        self.end = end

    def __iter__(self):
        info = get_worker_info()
        length = self.end - self.start
        share = -(-length // info.num_workers)
        first = self.start + info.id * share
        yield from range(first, min(first + share, self.end))

    def __len__(self):
        return self.end - self.start


for batch in DataLoader(Lines(), batch_size=3, num_workers=2):
    print(batch)
for kwargs in ({}, {"drop_last": True}, {"batch_size": None}):
    loader = DataLoader(Range(3, 22), **{"batch_size": 4, **kwargs}, num_workers=2)
    print(len(loader), [torch.as_tensor(batch).tolist() for batch in loader])
both = ChainDataset([Lines(), Range(0, 3)])
print(list(DataLoader(both, batch_size=None, num_workers=2)))
