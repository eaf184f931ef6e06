"""A dataset that computes in a pool of processes, within its worker."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

from torch.utils.data import DataLoader


def square(x):
    return x * x


class InPool:
    pool = None

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if self.pool is None:
            self.pool = multiprocessing.Pool(2)
        return sum(self.pool.map(square, range(10 * (index + 1))))


class InThreads(InPool):
    def __getitem__(self, index):
        if self.pool is None:
            self.pool = ThreadPoolExecutor(2)
        return sum(self.pool.map(square, range(10 * (index + 1))))


print(list(DataLoader(InThreads(), num_workers=1)))
try:
    print(list(DataLoader(InPool(), num_workers=1)))
except AssertionError as error:
    print("refused:", str(error).splitlines()[-1])
