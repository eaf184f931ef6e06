"""Batches by length, weighted draws, and a sampler that the script writes itself."""

import random

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torch.utils.data import BatchSampler, Dataset, Sampler, WeightedRandomSampler

torch.manual_seed(11)
random.seed(11)


class Sentences(Dataset):
    def __init__(self):
        self.lengths = [random.randint(1, 20) for _ in range(40)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.full((self.lengths[index],), index)


class Buckets(Sampler):
    def __init__(self, lengths, batch_size):
        self.lengths = lengths
        self.batch_size = batch_size

    def __iter__(self):
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        size = self.batch_size
        batches = [order[k : k + size] for k in range(0, len(order), size)]
        random.shuffle(batches)
        yield from batches

    def __len__(self):
        return -(-len(self.lengths) // self.batch_size)


def pad(rows):
    return pad_sequence(rows, batch_first=True, padding_value=-1)


dataset = Sentences()
buckets = Buckets(dataset.lengths, 8)
loader = DataLoader(dataset, batch_sampler=buckets, collate_fn=pad, num_workers=2)
for epoch in range(2):
    for batch in loader:
        print(tuple(batch.shape), batch[:, 0].tolist())
weights = [1 / length for length in dataset.lengths]
weighted = WeightedRandomSampler(weights, 20, replacement=True)
for batch in DataLoader(dataset, 5, sampler=weighted, collate_fn=pad, num_workers=2):
    print(batch[:, 0].tolist())
whole = BatchSampler(weighted, 10, drop_last=False)
for batch in DataLoader(range(40), batch_sampler=whole, num_workers=2, collate_fn=sum):
    print(batch)
