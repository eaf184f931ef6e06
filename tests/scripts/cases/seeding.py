"""The documented recipe: numpy and random are seeded by worker."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset, get_worker_info


def seed_worker(worker_id):
    worker_seed = torch.initial_seed() % 2**32
    np.random.seed(worker_seed)
    random.seed(worker_seed)
    get_worker_info().dataset.rng = np.random.default_rng(worker_seed + worker_id)


class Noise(Dataset):
    rng = None

    def __len__(self):
        return 12

    def __getitem__(self, index):
        draws = np.random.rand(), random.random(), self.rng.random()
        return index, torch.rand(2), torch.tensor(draws)


torch.manual_seed(1)
g = torch.Generator()
g.manual_seed(0)
random.seed(1)
np.random.seed(1)
loader = DataLoader(
    Noise(), 2, shuffle=True, num_workers=2, worker_init_fn=seed_worker, generator=g
)
for epoch in range(2):
    for index, a, b in loader:
        print(index.tolist(), a.tolist(), b.tolist())
print(np.random.rand(), random.random(), torch.rand(1).item(), g.initial_seed())
