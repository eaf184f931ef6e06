"""Three epochs over scanned digits, augmented, in the way of the MNIST example."""

import numpy as np
import scipy.ndimage
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset

torch.manual_seed(1)
torch.set_num_threads(1)


class Digits(Dataset):
    def __init__(self, train):
        digits = load_digits()
        part = slice(0, 600) if train else slice(600, 800)
        self.images = digits.images[part].astype(np.uint8) * 15
        self.labels = digits.target[part]
        self.train = train

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = Image.fromarray(self.images[index]).resize((10, 10))
        pixels = np.asarray(image, dtype=np.float32) / 255
        if self.train:
            angle = float(torch.empty(1).uniform_(-10, 10))
            pixels = scipy.ndimage.rotate(pixels, angle, reshape=False, order=1)
        return torch.from_numpy(pixels)[None], int(self.labels[index])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.fc = nn.Linear(8 * 64, 10)

    def forward(self, x):
        return self.fc(torch.relu(self.conv(x)).flatten(1))


def train(model, loader, optimizer):
    total = 0.0
    for data, target in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


@torch.no_grad()
def accuracy(model, loader):
    right = sum(
        (model(data).argmax(1) == target).sum().item() for data, target in loader
    )
    return right / len(loader.dataset)


train_loader = DataLoader(Digits(True), batch_size=64, shuffle=True, num_workers=2)
test_loader = DataLoader(Digits(False), batch_size=100, num_workers=2)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(3):
    loss = train(model, train_loader, optimizer)
    print(f"epoch {epoch}: loss {loss!r}, accuracy {accuracy(model, test_loader):.3f}")
