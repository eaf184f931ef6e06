"""A start method that is set for all, as for CUDA, and one that is given."""

import multiprocessing

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset


class Rows(Dataset):
    def __init__(self, n):
        self.rows = torch.arange(n)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index], multiprocessing.get_start_method()


def main():
    for context in (None, "fork", multiprocessing.get_context("forkserver")):
        loader = DataLoader(Rows(6), 3, num_workers=2, multiprocessing_context=context)
        for rows, methods in loader:
            print(rows.tolist(), methods)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
