"""Small pictures of every kind, made here."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIDE = 6


def pixels(seed: int, *shape: int) -> Any:
    """Return values of uint8, ``(SIDE, SIDE, *shape)``."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (SIDE, SIDE, *shape), dtype=np.uint8)


def encoded(values: Any, name: str = "PNG") -> bytes:
    data = io.BytesIO()
    image = values if isinstance(values, Image.Image) else Image.fromarray(values)
    image.save(data, name)
    return data.getvalue()


# As a person may have them: folders in folders, a name that begins like another, dots,
# upper case, and files that are no pictures.
TREE = {
    "cat/b.png": 0,
    "cat/z.v2.PNG": 1,
    "cat/more/a.png": 2,
    "cat-b/1.png": 3,
    "dog/10.png": 4,
    "dog/2.jpeg": 5,
    "dog/moving.gif": None,
    "dog/notes.txt": None,
    "readme.md": None,
}


def write_tree(root: Path) -> Path:
    """Write ``TREE``; a picture's values begin with its number."""
    for name, number in TREE.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if number is None:
            path.write_text("no picture")
            continue
        values = np.full((SIDE, SIDE, 3), 40 * number, np.uint8)
        path.write_bytes(encoded(values, "JPEG" if "jpeg" in name else "PNG"))
    return root
