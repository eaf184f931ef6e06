"""Members of samples other than pictures: numbers, text, JSON, arrays and tensors.

The extensions are WebDataset's. Pickles are left as they are, because they run code.
"""

import io
import json
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from aioloader.datasets._decode.pictures import EXTENSIONS, encode_picture

_TEXT = frozenset({"txt", "text", "transcript"})
_NUMBER = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
_JSON = frozenset({"json", "jsn"})


def _read_npy(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


def _read_npz(data: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)


def _read_pth(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _read_text(data: bytes) -> str:
    return data.decode()


DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(_TEXT, _read_text),
    **dict.fromkeys(_NUMBER, int),
    **dict.fromkeys(_JSON, json.loads),
    "npy": _read_npy,
    "npz": _read_npz,
    "pth": _read_pth,
}


def is_light(value: Any) -> bool:
    """Return whether encoding ``value`` is quick."""
    return isinstance(value, (bytes, str, int, bytearray, memoryview))


def is_buffer(value: Any) -> bool:
    """Return whether ``value`` holds bytes, and is not an array of numbers."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return True
    return type(value).__module__.partition(".")[0] == "obstore"


def encode(value: Any, extension: str) -> bytes:
    """Return ``value`` as the bytes of a member; bytes and text are kept as they are.

    Raises:
        TypeError: If the extension cannot hold its type.
        ValueError: If the extension cannot hold its value.
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
    if last in EXTENSIONS:
        return encode_picture(value, last)
    data = io.BytesIO()
    if last == "npy":
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
