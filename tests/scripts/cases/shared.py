"""Queues, values, locks, managers and tensors that workers and the script share."""

import multiprocessing as mp

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset

used = mp.Queue()
used.put("before")
assert used.get() == "before"  # its feeder thread runs by now
counter = mp.Value("i", 0)
table = mp.Array("d", 8)
lock = mp.Lock()
manager = mp.Manager()
log, settings = manager.list(), manager.dict(scale=2)
seen = torch.zeros(8, dtype=torch.int64).share_memory_()


class Sharing(Dataset):
    def __init__(self):
        self.queue = used

    def __len__(self):
        return 8

    def __getitem__(self, index):
        with counter.get_lock():
            counter.value += 1
        with lock:
            table[index] = index / 2
        seen[index] += 1
        log.append(index)
        self.queue.put(("read", index))
        return index * settings["scale"]


for epoch in range(2):
    batches = [batch.tolist() for batch in DataLoader(Sharing(), 2, num_workers=2)]
    items = sorted(used.get(timeout=20) for _ in range(8))
    print(batches, items, counter.value, list(table), seen.tolist(), sorted(log))
    settings["scale"] += 1
    del log[:]
print(used.empty())
manager.shutdown()
