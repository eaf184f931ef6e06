"""pin_memory=True on a machine without a GPU: the warning is what people see."""

import warnings

import torch
from torch.utils.data import DataLoader
from torch.utils.data import TensorDataset

warnings.simplefilter("always")
dataset = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
with warnings.catch_warnings(record=True) as caught:
    loader = DataLoader(dataset, batch_size=2, num_workers=2, pin_memory=True)
    for x, y in loader:
        x, y = x.to("cpu", non_blocking=True), y.to("cpu", non_blocking=True)
        print(x.tolist(), y.tolist(), x.is_pinned())
for warning in caught:
    print(warning.category.__name__, warning.message)
