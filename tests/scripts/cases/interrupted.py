"""Ctrl-C while batches come; the terminal sends it to workers, too."""

import time

from torch.utils.data import DataLoader


class Slow:
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index > 10:
            time.sleep(60)
        return index


for batch in DataLoader(Slow(), batch_size=2, num_workers=2):
    print("a batch", flush=True)
