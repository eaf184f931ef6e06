# %%
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset

torch.manual_seed(0)
scale = 2


# %%
class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return helper(index) * scale


def helper(index):
    return torch.tensor(index * index)


# %%
for batch in DataLoader(Squares(), batch_size=4, num_workers=2):
    print(batch.tolist())


# %%
# a second thought: the class is written anew, and so is what it calls
class Squares(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"value": helper(index), "noise": torch.rand(1)}


def helper(index):
    return torch.tensor(-index * scale)


# %%
scale = 10
loader = DataLoader(
    Squares(),
    batch_size=2,
    num_workers=2,
    shuffle=True,
    collate_fn=lambda samples: [
        (s["value"].item(), s["noise"].item()) for s in samples
    ],
)
print(list(loader))

# %%
# the same loader again, after a global has changed
scale = 100
print(list(loader))

# %%
print("one batch: ", end="")
print(next(iter(loader)))
