"""The script that startup.py times: three epochs over scanned digits.

The imports at its top cost every fresh worker half a second and more, its dataset is in
``__main__``, and nothing is guarded. The loader comes from the module that its argument
names. It prints how long the epochs took, in ms, from the first loader on.
"""

import importlib
import sys
import time

import numpy as np
import scipy.ndimage
import sklearn.datasets
import torch
from PIL import Image

DataLoader = importlib.import_module(sys.argv[1]).DataLoader
DIGITS = sklearn.datasets.load_digits()


class Digits:
    """Pictures, turned a little, and what they show."""

    def __init__(self, first: int, last: int) -> None:
        self.images = DIGITS.images[first:last].astype(np.uint8) * 15
        self.labels = DIGITS.target[first:last]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.fromarray(self.images[index]).resize((10, 10))
        pixels = np.asarray(image, dtype=np.float32) / 255
        angle = float(torch.empty(1).uniform_(-10, 10))
        pixels = scipy.ndimage.rotate(pixels, angle, reshape=False, order=1)
        return torch.from_numpy(pixels), int(self.labels[index])


start = time.perf_counter()
model = torch.nn.Linear(100, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = DataLoader(Digits(0, 1200), 64, shuffle=True, num_workers=2)
test = DataLoader(Digits(1200, 1500), 100, num_workers=2)
right = 0
for _ in range(3):
    for x, y in train:
        loss = torch.nn.functional.cross_entropy(model(x.flatten(1)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = sum(int((model(x.flatten(1)).argmax(1) == y).sum()) for x, y in test)
if right < 100:
    raise SystemExit(f"{right} of 300 are right: it has not learned")
print((time.perf_counter() - start) * 1e3)
