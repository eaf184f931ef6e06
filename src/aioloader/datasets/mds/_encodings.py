"""The encodings of MDS columns, as MosaicML Streaming publishes them.

All numbers are little-endian. Pillow is imported only for images.
"""

import json
import pickle
import struct
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from io import BytesIO
from types import ModuleType
from typing import Any

import numpy as np

from aioloader._base.extras import imported

Decode = Callable[[bytes], Any]
_SCALARS = (
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)
# The codes of dtypes: the bits, one more if signed, two more if floating.
_DTYPES = {
    np.dtype(name).itemsize * 8 + {"u": 0, "i": 1, "f": 2}[name[0]]: name
    for name in _SCALARS
}
_SIDES = ("<u1", "<u2", "<u4", "<u8")


def decoder_of(encoding: str, *, allow_unsafe_types: bool) -> Decode:
    """Return the decoder of a column.

    A ValueError if the encoding is unknown, or unsafe and not allowed.
    """
    name, _, config = encoding.partition(":")
    if name == "ndarray":
        return _array_decoder(config)
    if name in _SCALARS:
        return partial(_scalar, np.dtype(name).newbyteorder("<"))
    if name in _PICTURES:
        return _picture_decoder(*_PICTURES[name])
    if name == "pkl":
        if not allow_unsafe_types:
            raise ValueError(
                "encoding 'pkl' runs any code that the file's author wrote; if you "
                "trust them, pass allow_unsafe_types=True"
            )
        return pickle.loads  # noqa: S301  (allowed by name)
    if name not in _PLAIN:
        raise ValueError(
            f"unknown encoding {encoding!r}; write the shards with another"
        )
    return _PLAIN[name]


def _scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    value = np.frombuffer(data, dtype)
    if len(value) != 1:
        raise ValueError(f"{len(data)} bytes for a number of type {dtype.name}")
    return value[0]


def _text(make: Callable[[str], Any], data: bytes) -> Any:
    return make(str(data, "utf-8"))


def _int(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _array_decoder(config: str) -> Decode:
    """Return a decoder of arrays; both parts of ``dtype:shape`` are optional."""
    dtype, _, shape = config.partition(":")
    if dtype and dtype not in _SCALARS:
        raise ValueError(f"unknown dtype {dtype!r} of an ndarray")
    sides = tuple(map(int, shape.split(","))) if shape else None
    return partial(_array, dtype or None, sides)


def _array(dtype: str | None, shape: tuple[int, ...] | None, data: bytes) -> Any:
    at = 0
    if dtype is None:
        dtype, at = _DTYPES[data[0]], 1
    if shape is None:
        number, kind = divmod(data[at], 4)
        sides = np.frombuffer(data, _SIDES[kind], number, at + 1)
        shape = tuple(sides.tolist())
        at += 1 + sides.nbytes
    # A copy, because tensors share memory with arrays, and bytes are read-only.
    values = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), offset=at)
    return values.reshape(shape).astype(dtype)


def _list(decode: Decode, start: int, data: bytes) -> list[Any]:
    """Decode a count, the lengths and the parts, starting at ``start``."""
    (count,) = struct.unpack_from("<I", data, start)
    lengths = struct.unpack_from(f"<{count}I", data, start + 4)
    at = start + 4 + 4 * count
    if at + sum(lengths) != len(data):
        raise ValueError(f"a list of {at + sum(lengths):,} bytes in {len(data):,}")
    found = []
    for length in lengths:
        found.append(decode(data[at : at + length]))
        at += length
    return found


def _picture_decoder(name: str, count_at: int | None) -> Decode:
    image = imported("PIL.Image", "pictures", "columns of images need Pillow")
    decode = partial(_raw_picture if name == "pil" else _picture, image)
    return decode if count_at is None else partial(_list, decode, count_at)


def _picture(image: ModuleType, data: bytes) -> Any:
    return image.open(BytesIO(data))


def _raw_picture(image: ModuleType, data: bytes) -> Any:
    """Decode width, height, length of the mode's name, that name, and pixels."""
    width, height, length = struct.unpack_from("<3I", data)
    mode = str(data[12 : 12 + length], "utf-8")
    return image.frombytes(mode, (width, height), data[12 + length :])


# Image encodings, and the offset of the count for lists.
_PICTURES: dict[str, tuple[str, int | None]] = {
    **{name: (name, None) for name in ("pil", "jpeg", "png")},
    **{f"list[{name}]": (name, 4) for name in ("pil", "jpeg", "png")},
    "jpeg_array": ("jpeg", 0),
    "jpegarray": ("jpeg", 0),
}
_PLAIN: dict[str, Decode] = {
    "bytes": bytes,
    "str": partial(_text, str),
    "int": _int,
    "str_int": partial(_text, int),
    "str_float": partial(_text, float),
    "str_decimal": partial(_text, Decimal),
    "json": partial(_text, json.loads),
}
