"""Pictures to decode: JPEGs of 500 x 375, cut from scikit-learn's two photographs."""

from __future__ import annotations

import functools
import io
import random
from functools import partial
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from layouts import ENDLESS, Case, fill_images

if TYPE_CHECKING:
    from collections.abc import Callable

PICTURES = 64
BATCH = 64
SIDE = 224
_WIDTH, _HEIGHT = 500, 375
Pixels = np.ndarray[Any, np.dtype[np.uint8]]

# OpenCV's own threads would take the cores of the other worker
cv2.setNumThreads(0)


@functools.cache
def jpegs() -> list[bytes]:
    """Cut and encode the pictures, once per process and its forks."""
    from sklearn.datasets import load_sample_images  # noqa: PLC0415

    chance = random.Random(0)
    photographs = [Image.fromarray(one) for one in load_sample_images().images]
    encoded = []
    for number in range(PICTURES):
        whole = photographs[number % 2]
        left = chance.randrange(whole.width - _WIDTH)
        top = chance.randrange(whole.height - _HEIGHT)
        body = io.BytesIO()
        cut = whole.crop((left, top, left + _WIDTH, top + _HEIGHT))
        cut.save(body, "JPEG", quality=90)
        encoded.append(body.getvalue())
    return encoded


def random_square() -> tuple[int, int, int]:
    """Choose left, top and side of a crop."""
    side = random.randint(SIDE, _HEIGHT)
    return random.randint(0, _WIDTH - side), random.randint(0, _HEIGHT - side), side


def with_pillow(body: bytes) -> Pixels:
    left, top, side = random_square()
    box = (left, top, left + side, top + side)
    with Image.open(io.BytesIO(body)) as picture:
        resized = picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box)
    return np.array(resized)


def with_opencv(body: bytes) -> Pixels:
    left, top, side = random_square()
    picture = cv2.imdecode(np.frombuffer(body, np.uint8), cv2.IMREAD_COLOR_RGB)
    return cv2.resize(picture[top : top + side, left : left + side], (SIDE, SIDE))


class Pictures(Dataset[torch.Tensor]):
    """Random crops of pictures, ``uint8[224, 224, 3]``, decoded on access."""

    def __init__(self, decode: Callable[[bytes], Pixels]) -> None:
        self._jpegs, self._decode = jpegs(), decode

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        body = self._jpegs[index % PICTURES]
        return torch.from_numpy(self._decode(body))


def picture_case(name: str) -> Case:
    """Make the case of one decoder: ``Pillow`` or ``OpenCV``."""
    decoders = {"Pillow": with_pillow, "OpenCV": with_opencv}
    layout = [((BATCH, SIDE, SIDE, 3), torch.uint8)]
    dataset = partial(Pictures, decoders[name])
    return Case(name, dataset, BATCH, layout, fill_images)
