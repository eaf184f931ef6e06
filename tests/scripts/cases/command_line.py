"""Arguments parsed into a global that the dataset reads; the exit status says more."""

import argparse
import sys

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset, SubsetRandomSampler


class Table(Dataset):
    def __len__(self):
        return args.size

    def __getitem__(self, index):
        return {"x": torch.full((2,), args.scale * index), "name": f"row-{index}"}


def main():
    torch.manual_seed(args.seed)
    chosen = SubsetRandomSampler(range(0, args.size, 2))
    loader = DataLoader(
        Table(),
        args.batch_size,
        sampler=chosen,
        num_workers=args.workers,
        drop_last=args.drop_last,
    )
    for epoch in range(args.epochs):
        for batch in loader:
            print(epoch, batch["x"].sum().item(), batch["name"])
    print(len(loader), len(loader.dataset))
    return 3


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--scale", type=float, default=1)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drop-last", action="store_true")
    args = parser.parse_args()
    sys.exit(main())
