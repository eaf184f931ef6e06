"""Loops that end early, loops in loops, two loaders side by side, and for ever."""

from itertools import cycle, islice

import torch
from torch.utils.data import DataLoader
from torch.utils.data import TensorDataset

torch.manual_seed(9)
dataset = TensorDataset(torch.arange(24))
loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)
other = DataLoader(dataset, batch_size=6, shuffle=True, num_workers=2)

for epoch in range(3):
    for step, (x,) in enumerate(loader):
        print(epoch, step, x.tolist())
        if step == 1:
            break
print(next(iter(loader))[0].tolist())

for (a,), (b,) in zip(loader, other):
    print(a.tolist(), b.tolist())
for (a,) in islice(other, 2):
    print("outer", a.tolist(), [x.sum().item() for (x,) in loader])


def forever(loader):
    while True:
        yield from loader


endless = forever(loader)
print([next(endless)[0].tolist() for _ in range(8)])
print([x.sum().item() for (x,) in islice(cycle(other), 6)])
iterator = iter(loader)
print(len(iterator), len(list(iterator)), next(iterator, "over"))
