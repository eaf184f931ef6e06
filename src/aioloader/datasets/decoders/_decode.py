"""Bytes to values and back, by extension: images, numbers, text, arrays and tensors.

Extensions and formats have WebDataset's names. torchvision decodes images to tensors
if it is installed, Pillow all others. Pickles are left as they are: they run code.
"""

import functools
import io
import json
import operator
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from aioloader._base.extras import imported

# The extensions of torchvision's ImageFolder, and others that Pillow reads.
FOLDER_EXTENSIONS = frozenset({
    "bmp", "jpeg", "jpg", "pgm", "png", "ppm", "tif", "tiff", "webp",
})  # fmt: skip
EXTENSIONS = FOLDER_EXTENSIONS | {"gif", "jfif", "jpe", "pbm", "pnm"}
_JPEGS = frozenset({"jfif", "jpe", "jpeg", "jpg"})
# Word: the type, whether its values are floats from 0 to 1, and the colors.
SPECS = {
    f"{kind}{colors}{bits}": (kind, not bits, colors.upper())
    for kind, depths in (("", ("", "8")), ("pil", ("",)), ("torch", ("", "8")))
    for colors in ("l", "rgb", "rgba")
    for bits in depths
} | {"pil": ("pil", True, "RGB"), "torch": ("torch", True, "RGB")}
_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
# Offset of the bit depth in a PNG.
_PNG_DEPTH = 24


class Picture:
    """Decodes images to the format of one word of ``SPECS``."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._kind, self._is_float, self._mode = SPECS[spec]
        pillow()

    def __call__(self, data: bytes) -> Any:
        """Return an image, an array ``(H, W[, C])`` or a tensor ``(C, H, W)``."""
        if self._kind == "torch" and self._mode == "RGB" and _is_plain(data):
            reader = _torchvision()
            if reader is not None:
                raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                return self._scaled(reader.decode_image(raw, mode="RGB"))
        image = self._opened(data)
        if self._kind == "pil":
            return image
        values = np.asarray(image)  # read-only
        if self._kind == "torch":
            planes = values[None] if values.ndim == 2 else values.transpose(2, 0, 1)
            return self._scaled(torch.from_numpy(planes.copy()))
        return values.astype(np.float32) / 255 if self._is_float else values.copy()

    def _opened(self, data: bytes) -> Any:
        with pillow().open(io.BytesIO(data)) as image:
            if image.mode[0] in "IF":
                raise ValueError(
                    f"it has values of more than 8 bits (Pillow's mode {image.mode!r}),"
                    f" which {self._mode} would cut; pass a function for its extension"
                )
            image.load()
            return image.convert(self._mode)

    def _scaled(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.float().div_(255) if self._is_float else pixels


def pillow() -> Any:
    """Return Pillow's Image module, or raise an error that says how to install it."""
    return imported("PIL.Image", "pictures", "decoding images needs Pillow")


@functools.cache
def _torchvision() -> types.ModuleType | None:
    try:
        import torchvision.io  # noqa: PLC0415  (an optional dependency)
    except (ImportError, OSError, RuntimeError):
        return None  # not installed, or built for another torch
    module: types.ModuleType = torchvision.io
    return module


def _is_plain(data: bytes) -> bool:
    """Return whether torchvision decodes ``data`` like Pillow: 8 bits per value."""
    if data.startswith(_PNG):
        return data[_PNG_DEPTH : _PNG_DEPTH + 1] == b"\x08"
    return data.startswith(_JPEG)


# -- other members ----------------------------------------------------------------

_NUMBER = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
_JSON = frozenset({"json", "jsn"})


def _read_npz(data: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)


DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(_NUMBER, int),
    **dict.fromkeys(_JSON, json.loads),
    "npy": lambda data: np.load(io.BytesIO(data), allow_pickle=False),
    "npz": _read_npz,
    "pth": lambda data: torch.load(
        io.BytesIO(data), map_location="cpu", weights_only=True
    ),
}


def is_buffer(value: Any) -> bool:
    """Return whether ``value`` holds bytes, and is not an array of numbers."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return True
    return type(value).__module__.partition(".")[0] == "obstore"


def encode(value: Any, extension: str) -> bytes:
    """Return ``value`` as the bytes of a member; bytes and text are kept as they are.

    JPEGs have quality 95. Raises a TypeError or a ValueError if the extension cannot
    hold its type or its value.
    """
    if isinstance(value, str):
        return value.encode()
    if is_buffer(value):
        return bytes(value)
    last = extension.rpartition(".")[2]
    if last in _NUMBER:
        return b"%d" % operator.index(value)
    if last in _JSON:
        return json.dumps(value, ensure_ascii=False).encode()
    data = io.BytesIO()
    if last in EXTENSIONS:
        data.name = f"picture.{last}"  # Pillow takes the format from it
        _image_of(value).save(data, **({"quality": 95} if last in _JPEGS else {}))
    elif last == "npy":
        np.save(data, np.asarray(value), allow_pickle=False)
    elif last == "npz":
        np.savez(data, **value)
    elif last == "pth":
        torch.save(value, data)
    else:
        raise TypeError(
            f"a {type(value).__name__} cannot be stored as {extension!r}: give bytes, "
            f"or use an extension for its type, such as 'json', 'npy', 'pth' or 'png'"
        )
    return data.getvalue()


def _image_of(value: Any) -> Any:
    """Return an image as one of Pillow's.

    It is one, an array ``(H, W[, C])`` or a tensor ``(C, H, W)``, of uint8 or of floats
    from 0 to 1.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
        value = value.transpose(1, 2, 0) if value.ndim == 3 else value
    if not isinstance(value, np.ndarray):
        return value
    if value.ndim == 3 and value.shape[2] == 1:
        value = value[:, :, 0]
    if not (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in {3, 4})):
        raise ValueError(
            f"images have 1, 3 or 4 channels, got the shape {value.shape} (H, W, C)"
        )
    if value.dtype.kind == "f":
        low, high = float(value.min()), float(value.max())
        if not (low >= 0 and high <= 1):
            raise ValueError(
                f"images of floats have values from 0 to 1, got {low:g} to {high:g}"
            )
        value = np.rint(value * 255).astype(np.uint8)
    if value.dtype != np.uint8:
        raise ValueError(f"images must be uint8 or float, got {value.dtype}")
    return pillow().fromarray(value)
