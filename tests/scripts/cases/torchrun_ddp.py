"""Training by torchrun: two ranks, gloo, DistributedSampler, DDP; rank 0 validates."""

import gc

import torch
import torch.distributed as dist
import torch.distributed.nn  # loaded after init, it keeps the group
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
rank = dist.get_rank()
digits = load_digits()
images = torch.from_numpy(digits.data[:501]).float() / 16
labels = torch.from_numpy(digits.target[:501])
train_set = TensorDataset(images[:400], labels[:400])
val_set = TensorDataset(images[400:], labels[400:])

sampler = DistributedSampler(train_set, shuffle=True)
train_loader = DataLoader(train_set, 50, sampler=sampler, num_workers=2)
val_loader = DataLoader(val_set, 40, num_workers=2)
model = DistributedDataParallel(nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in train_loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        right = seen = 0
        with torch.no_grad():
            for x, y in val_loader:
                right += (model.module(x).argmax(1) == y).sum().item()
                seen += len(y)
        print(f"epoch {epoch}: {mean.item()!r}, {right} of {seen}", flush=True)
del model, optimizer, loss
gc.collect()  # the model's reference cycles keep the group's threads alive
dist.destroy_process_group()
