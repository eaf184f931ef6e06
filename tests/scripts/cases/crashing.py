"""Native code crashes in a worker: the script sees a RuntimeError."""

import ctypes
import faulthandler

from torch.utils.data import DataLoader

faulthandler.enable()


class Crashing:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            ctypes.string_at(0)
        return index


loader = DataLoader(Crashing(), batch_size=2, num_workers=2)
try:
    for batch in loader:
        pass
except RuntimeError as error:
    print("RuntimeError", "DataLoader worker (pid" in str(error))
