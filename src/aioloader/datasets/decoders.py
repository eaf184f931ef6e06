"""Decode samples' bytes by extension to images, numbers, text and arrays.

A ``Decoder`` is a picklable function of a sample. It runs on the CPU, in threads as the
``decode`` of a stream or dataset, or in workers as a loader's ``transform``.
"""

import difflib
import functools
import io
import json
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from aioloader._base.extras import imported
from aioloader.datasets._streams.cursors import qualname
from aioloader.errors import DecodeError

# The extensions of torchvision's ImageFolder, and others that Pillow reads.
FOLDER_EXTENSIONS = frozenset({
    "bmp", "jpeg", "jpg", "pgm", "png", "ppm", "tif", "tiff", "webp",
})  # fmt: skip
EXTENSIONS = FOLDER_EXTENSIONS | {"gif", "jfif", "jpe", "pbm", "pnm"}
_JPEGS = frozenset({"jfif", "jpe", "jpeg", "jpg"})
# Image formats by name: type, whether values are floats from 0 to 1, and colors.
SPECS = {
    f"{kind}{colors}{bits}": (kind, not bits, colors.upper())
    for kind, depths in (("", ("", "8")), ("pil", ("",)), ("torch", ("", "8")))
    for colors in ("l", "rgb", "rgba")
    for bits in depths
} | {"pil": ("pil", True, "RGB"), "torch": ("torch", True, "RGB")}
_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
# Offset of the bit depth in a PNG.
_PNG_DEPTH_AT = 24
ByExtension: TypeAlias = Mapping[str, "str | Callable[[bytes], Any]"]
DecoderSpec: TypeAlias = str | ByExtension | Callable[[str, bytes], Any]


class Picture:
    """Decodes images to one of the formats in ``SPECS``."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._kind, self._is_float, self._mode = SPECS[spec]
        pillow()

    def __call__(self, data: bytes) -> Any:
        """Return a Pillow image, an array ``(H, W[, C])`` or a tensor ``(C, H, W)``."""
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
    """Return Pillow's ``Image`` module; the ImportError says how to install Pillow."""
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
    """Tell whether torchvision decodes ``data`` like Pillow: a JPEG or 8-bit PNG."""
    if data.startswith(_PNG):
        return data[_PNG_DEPTH_AT : _PNG_DEPTH_AT + 1] == b"\x08"
    return data.startswith(_JPEG)


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
    """Tell whether ``value`` is a buffer of bytes, not an array of numbers."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return True
    return type(value).__module__.partition(".")[0] == "obstore"


def encode(value: Any, extension: str) -> bytes:
    """Encode a value by a file extension; bytes stay unchanged, text becomes UTF-8.

    Raise a TypeError or ValueError if the extension does not suit the value.
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
        data.name = f"picture.{last}"  # Pillow infers the format from the name
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
    """Convert an array ``(H, W[, C])`` or a tensor ``(C, H, W)`` to a Pillow image."""
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


class Decoder:
    """Decodes samples by the extensions of their members, like WebDataset.

    A sample is a dict of bytes by extension, as from ``TarDataset``; the bytes of an
    image; or a tuple that starts with them. Values that are not bytes stay unchanged,
    and so do those whose names start with ``__``. ``txt``, ``cls``, ``id``, ``json``,
    ``npy``, ``npz``, ``pth`` and their synonyms need no ``specs``. Bytes without a
    decoder stay bytes; so do pickles, because loading them runs code.

    Args:
        specs: In any order:

            - the type of all images: ``"pil"`` (``"pill"``, ``"pilrgba"``): Pillow
              images; ``"torch"`` (``"torchrgb"``, ``"torchl"``, ``"torchrgba"``):
              tensors ``(C, H, W)`` of float32 from 0 to 1; ``"rgb"`` (``"l"``,
              ``"rgba"``): arrays ``(H, W, C)``, for ``"l"`` ``(H, W)``, of float32 from
              0 to 1. With the suffix 8 (``"torchrgb8"``, ``"rgb8"``): uint8;
            - a dict from extensions to functions of bytes, or these words. A dict takes
              precedence, and the longest extension wins (``"mask.png"`` over
              ``"png"``);
            - a function of ``".extension"`` and bytes, tried next. Like WebDataset's
              handlers, it returns None for extensions that it does not decode.

    Raises:
        ValueError: If a word is unknown, or two words set the type of images.
        ImportError: If images need Pillow, and it is not installed.

    Example:
        >>> Decoder({"bin": len})({"__key__": "a", "cls": b"7", "bin": b"123"})
        {'__key__': 'a', 'cls': 7, 'bin': 3}
    """

    def __init__(self, *specs: DecoderSpec) -> None:
        self.specs = specs
        self._named: dict[str, Callable[[bytes], Any]] = {}
        self._functions: list[Callable[[str, bytes], Any]] = []
        self._picture: Picture | None = None
        for spec in specs:
            self._add(spec)

    def _add(self, spec: Any) -> None:
        if isinstance(spec, str):
            if self._picture is not None:
                raise ValueError(f"images have one format, got {self.specs}")
            self._picture = _picture(spec)
        elif isinstance(spec, Mapping):
            for name, value in spec.items():
                function = _picture(value) if isinstance(value, str) else value
                self._named.setdefault(name.lower().lstrip("."), function)
        elif callable(spec):
            self._functions.append(spec)
        else:
            raise TypeError(
                f"a decoder is a word, a dict of functions by extension or a function, "
                f"got {type(spec).__name__}"
            )

    def __call__(self, sample: Any) -> Any:
        """Return a decoded copy of the sample.

        Raises:
            DecodeError: If bytes do not match their extension. Errors of the user's
                functions are raised unchanged, with a note that names the sample.
            TypeError: If ``sample`` has another form, or is an image although ``specs``
                have no type for images.
        """
        if isinstance(sample, Mapping):
            source = str(sample.get("__key__", "")), str(sample.get("__url__", ""))
            return {
                name: self.decode(value, name, *source)
                if is_buffer(value) and name[:2] != "__"
                else value
                for name, value in sample.items()
            }
        data, *rest = sample if isinstance(sample, tuple) and sample else [sample]
        if not is_buffer(data):
            raise TypeError(
                f"a Decoder takes dicts of bytes by extension, the bytes of an image, "
                f"or a tuple that starts with them, got {type(sample).__name__}"
            )
        if self._picture is None:
            raise TypeError(
                f"bytes without an extension are decoded as an image, and {self!r} "
                f"has no word for images, such as 'torch'; or decode them where they "
                f"have names, with the dataset's `decode`"
            )
        picture = self.decode(data, "")
        return (picture, *rest) if isinstance(sample, tuple) else picture

    def decode(self, data: Any, extension: str, key: str = "", url: str = "") -> Any:
        """Decode one member; return its bytes unchanged if there is no decoder.

        Args:
            data: The bytes.
            extension: Such as ``"jpg"`` or ``"mask.png"``; empty for an image.
            key: Name of the sample, for errors.
            url: Address of the sample's shard, for errors.
        """
        data, extension = bytes(data), extension.lower()
        function = self._named_for(extension)
        is_own = isinstance(function, Picture)
        try:
            if function is None:
                for handler in self._functions:
                    if (value := handler(f".{extension}", data)) is not None:
                        return value
                is_own, last = True, extension.rpartition(".")[2]
                function = DECODERS.get(last)
                if self._picture is not None and (last in EXTENSIONS or not last):
                    function = self._picture
            return data if function is None else function(data)
        except Exception as error:
            member = f"{extension!r}" if extension else "an image"
            owner = f" of sample {key!r}" if key else ""
            where = f" in {url!r}" if url else ""
            place = f"{member}{owner}{where} ({len(data):,} bytes)"
            if is_own:
                text = f"cannot decode {place}: {type(error).__name__}: {error}"
                text += "; write it again, or skip it (on_error='skip')"
                raise DecodeError(text, location=url) from error
            error.add_note(f"aioloader: decoding {place}")
            raise

    def _named_for(self, extension: str) -> Callable[[bytes], Any] | None:
        """Return the user's function for the longest matching end of an extension."""
        while extension and self._named:
            if (function := self._named.get(extension)) is not None:
                return function
            extension = extension.partition(".")[2]
        return None

    def describe(self) -> dict[str, Any]:
        """Return the image formats and function names, which a state depends on."""
        words = {
            ext: function.spec if isinstance(function, Picture) else "function"
            for ext, function in sorted(self._named.items(), key=lambda item: item[0])
        }
        functions = {
            ext: qualname(function)
            for ext, function in self._named.items()
            if not isinstance(function, Picture)
        }
        return {
            "pictures": None if self._picture is None else self._picture.spec,
            "extensions": words,
            "handlers": len(self._functions),
            "function": [functions, *map(qualname, self._functions)],
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.specs

    def __repr__(self) -> str:
        return f"Decoder({', '.join(map(repr, self.specs))})"


def _picture(spec: str) -> Picture:
    if spec in SPECS:
        return Picture(spec)
    near = difflib.get_close_matches(spec, SPECS, 1)
    hint = f": did you mean {near[0]!r}?" if near else ""
    known = ", ".join(sorted(SPECS))
    raise ValueError(f"{spec!r} is not an image format{hint or '.'} There are {known}")
