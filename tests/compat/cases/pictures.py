"""Pictures of scikit-learn and scikit-image, with Pillow, and random augmentations."""

import io
import random
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFile
from skimage import data as skimage_data
from skimage import transform as skimage_transform
from sklearn.datasets import load_digits, load_sample_images
from torch.utils.data import Dataset, WeightedRandomSampler

from compat.kit import WORKERS, Cases, Kit, plain

cases = Cases()


class Digits(Dataset[Any]):
    """Digits as Pillow's images, augmented by three generators."""

    def __init__(self, *, augment: bool) -> None:
        found = load_digits()
        self.pictures, self.labels = found.images[:40], found.target[:40]
        self.augment = augment

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Any:
        picture = Image.fromarray((self.pictures[index] * 15).astype(np.uint8))
        if self.augment:
            picture = picture.rotate(random.uniform(-20, 20))
        pixels = torch.from_numpy(np.array(picture, dtype=np.float32))
        if self.augment:
            pixels = pixels + torch.rand(()) + float(np.random.rand())
        return {"x": pixels, "label": int(self.labels[index])}


@cases.add(*WORKERS)
def digits(kit: Kit, workers: int) -> Any:
    """Two epochs, shuffled."""
    loader = kit.loader(Digits(augment=False), 16, shuffle=True, num_workers=workers)
    return [[plain(batch) for batch in loader] for _ in range(2)]


@cases.add(*WORKERS)
def augmented(kit: Kit, workers: int) -> Any:
    """Bit for bit, with torch's generators per worker."""
    options: dict[str, Any] = {"rng": "worker"} if kit.is_ours and workers else {}
    data = Digits(augment=True)
    loader = kit.loader(data, 16, True, num_workers=workers, **options)
    return [[plain(batch) for batch in loader] for _ in range(2)]


@cases.add(*WORKERS)
def weighted(kit: Kit, workers: int) -> Any:
    """A weighted sampler over the classes."""
    data = Digits(augment=False)
    weights = [1.0 + label for label in data.labels]
    sampler = WeightedRandomSampler(weights, 30)
    loader = kit.loader(data, 16, sampler=sampler, num_workers=workers)
    return [[plain(batch["label"]) for batch in loader] for _ in range(2)]


class Encoded(Dataset[Any]):
    """JPEG bytes, one of them cut short: only a global of Pillow makes it readable."""

    def __init__(self) -> None:
        self.files = []
        pictures = [skimage_data.astronaut(), *load_sample_images().images]
        for picture in pictures:
            small = skimage_transform.resize(picture, (32, 32))
            file = io.BytesIO()
            Image.fromarray((small * 255).astype(np.uint8)).save(file, "JPEG")
            self.files.append(file.getvalue())
        self.files.append(self.files[0][:-40])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        with Image.open(io.BytesIO(self.files[index])) as picture:
            return torch.from_numpy(np.array(picture.convert("L"), dtype=np.int64))


@cases.add(*WORKERS)
def decoded(kit: Kit, workers: int) -> Any:
    """A setting at the top of a script reaches its workers."""
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    try:
        loader = kit.loader(Encoded(), 2, num_workers=workers)
        return [plain(batch) for batch in loader]
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = False
