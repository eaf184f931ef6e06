"""Pictures: bytes to Pillow images, arrays and tensors, and back.

The formats have WebDataset's names. torchvision decodes tensors if it is installed,
Pillow everything else.
"""

import functools
import io
import types
from typing import Any

import numpy as np
import torch

# The extensions of torchvision's ImageFolder, and others that Pillow reads.
FOLDER_EXTENSIONS = frozenset({
    "bmp", "jpeg", "jpg", "pgm", "png", "ppm", "tif", "tiff", "webp",
})  # fmt: skip
EXTENSIONS = FOLDER_EXTENSIONS | {"gif", "jfif", "jpe", "pbm", "pnm"}
# Name: the type, whether its values are floats from 0 to 1, and the colours.
SPECS = {
    "l": ("numpy", True, "L"),
    "l8": ("numpy", False, "L"),
    "pil": ("pil", False, "RGB"),
    "pill": ("pil", False, "L"),
    "pilrgb": ("pil", False, "RGB"),
    "pilrgba": ("pil", False, "RGBA"),
    "rgb": ("numpy", True, "RGB"),
    "rgb8": ("numpy", False, "RGB"),
    "rgba": ("numpy", True, "RGBA"),
    "rgba8": ("numpy", False, "RGBA"),
    "torch": ("torch", True, "RGB"),
    "torchl": ("torch", True, "L"),
    "torchl8": ("torch", False, "L"),
    "torchrgb": ("torch", True, "RGB"),
    "torchrgb8": ("torch", False, "RGB"),
    "torchrgba": ("torch", True, "RGBA"),
    "torchrgba8": ("torch", False, "RGBA"),
}
_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
# Offset of the bit depth in a PNG.
_PNG_DEPTH = 24


class Picture:
    """Decodes pictures to one format.

    Args:
        spec: One of ``SPECS``.

    Attributes:
        spec: The same.

    Raises:
        ImportError: If Pillow is not installed.
    """

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._kind, self._is_float, self._mode = SPECS[spec]
        pillow()

    def __call__(self, data: bytes) -> Any:
        """Return the picture: as an image, ``(H, W[, C])`` or ``(C, H, W)``.

        Raises:
            ValueError: If it has values of more than 8 bits, which would be cut.
            OSError: If it is damaged, or not a picture.
        """
        if self._kind == "torch" and self._mode == "RGB" and _is_plain(data):
            reader = _torchvision()
            if reader is not None:
                raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                return self._scaled(reader.decode_image(raw, mode="RGB"))
        image = self._opened(data)
        if self._kind == "pil":
            return image
        values = np.asarray(image)  # read-only
        if self._kind == "numpy":
            floats = self._is_float
            return values.astype(np.float32) / 255 if floats else values.copy()
        planes = values[None] if values.ndim == 2 else values.transpose(2, 0, 1)
        return self._scaled(torch.from_numpy(planes.copy()))

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
    """Return Pillow's Image module, or raise an error that says how to install it.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        from PIL import Image  # noqa: PLC0415  (an optional dependency)
    except ImportError as exc:
        raise ImportError(
            'decoding pictures needs Pillow: pip install "aioloader[pictures]"'
        ) from exc
    return Image


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


# -- to bytes ---------------------------------------------------------------------

_JPEGS = frozenset({"jfif", "jpe", "jpeg", "jpg"})


def encode_picture(value: Any, extension: str) -> bytes:
    """Return a picture as the bytes of a file.

    Args:
        value: A Pillow image; an array ``(H, W[, C])`` or a tensor ``(C, H, W)`` of
            uint8, or of floats from 0 to 1.
        extension: One of ``EXTENSIONS``; JPEGs have quality 95.

    Raises:
        ValueError: If it is not a picture.
    """
    data = io.BytesIO()
    data.name = f"picture.{extension}"  # Pillow takes the format from it
    _image_of(value).save(data, **({"quality": 95} if extension in _JPEGS else {}))
    return data.getvalue()


def _image_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
        value = value.transpose(1, 2, 0) if value.ndim == 3 else value
    if not isinstance(value, np.ndarray):
        return value
    if value.ndim == 3 and value.shape[2] == 1:
        value = value[:, :, 0]
    if not (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in {3, 4})):
        raise ValueError(
            f"pictures have 1, 3 or 4 channels, got the shape {value.shape} (H, W, C)"
        )
    if value.dtype.kind == "f":
        low, high = float(value.min()), float(value.max())
        if not (low >= 0 and high <= 1):
            raise ValueError(
                f"pictures of floats have values from 0 to 1, got {low:g} to {high:g}"
            )
        value = np.rint(value * 255).astype(np.uint8)
    if value.dtype != np.uint8:
        raise ValueError(f"pictures must be uint8 or float, got {value.dtype}")
    return pillow().fromarray(value)
