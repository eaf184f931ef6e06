"""Two ranks by torch.multiprocessing.spawn, each with a loader with workers."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader
from torch.utils.data import Dataset, DistributedSampler


class Numbers(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return index, torch.rand(1)


def work(rank, world_size, port, queue):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(rank)
    dataset = Numbers(21)
    sampler = DistributedSampler(dataset, shuffle=True, seed=3)
    loader = DataLoader(
        dataset, 4, sampler=sampler, num_workers=2, persistent_workers=True
    )
    seen = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for index, noise in loader:
            total = noise.sum()
            dist.all_reduce(total)
            seen.append((epoch, index.tolist(), total.item()))
    whole = sum(len(batch[0]) for batch in DataLoader(dataset, 8))
    queue.put((rank, seen, whole))
    dist.destroy_process_group()


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, args=(2, free_port(), queue), nprocs=2)
    for rank, seen, whole in sorted(queue.get() for _ in range(2)):
        print(rank, whole, *seen, sep="\n")
