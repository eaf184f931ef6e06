"""Errors of a dataset: caught by type while the loop continues, then uncaught."""

import sys

from torch.utils.data import DataLoader


class BadRowError(Exception):
    pass


class Rows:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index in (3, 7):
            raise BadRowError(f"row {index}")
        return index


loader = DataLoader(Rows(), batch_size=2, num_workers=2)
iterator = iter(loader)
for _ in range(len(loader)):
    try:
        print(next(iterator).tolist())
    except BadRowError as error:
        print("caught", type(error).__name__, "row" in str(error))
try:
    DataLoader(Rows(), batch_size=0)
except ValueError as error:
    print(error)
print(end="", flush=True)
sys.excepthook = lambda kind, error, trace: print(f"uncaught {kind.__name__}")
for batch in loader:
    print(batch.tolist())
