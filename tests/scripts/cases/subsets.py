"""Splits, folds and concatenations, as scripts compose their data."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import KFold
from torch.utils.data import DataLoader
from torch.utils.data import (
    ConcatDataset,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)

torch.manual_seed(3)
digits = load_digits()
images = torch.tensor(digits.images[:120], dtype=torch.float32)
labels = torch.tensor(digits.target[:120])
dataset = TensorDataset(images, labels)
first, second = random_split(dataset, [0.75, 0.25])
both = ConcatDataset([second, Subset(dataset, range(5))])
named = StackDataset(image=images, label=labels)


def show(name, loader):
    for batch in loader:
        image, label = batch.values() if isinstance(batch, dict) else batch
        print(name, image.sum().item(), label.tolist())


show("first", DataLoader(first, batch_size=32, shuffle=True, num_workers=2))
show("both", DataLoader(both, batch_size=16, num_workers=2))
show("named", DataLoader(named, batch_size=50, num_workers=2))
folds = KFold(3, shuffle=True, random_state=0).split(np.arange(120))
for train, test in folds:
    loader = DataLoader(Subset(dataset, test), batch_size=20, num_workers=2)
    print(len(train), len(loader))
    show("fold", loader)
