"""Samples to values: images, numbers, text and arrays, decoded by extension.

A ``Decoder`` is a plain, picklable function of a sample. It is CPU work: a step of a
stream or a dataset runs it in threads, a loader's ``transform`` in its workers.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from aioloader.datasets._streams.descriptions import name_of
from aioloader.datasets.decoders._decode import (
    DECODERS,
    EXTENSIONS,
    SPECS,
    Picture,
    is_buffer,
)
from aioloader.errors import DecodeError

ByExtension: TypeAlias = Mapping[str, "str | Callable[[bytes], Any]"]
Spec: TypeAlias = str | ByExtension | Callable[[str, bytes], Any]


class Decoder:
    """Decodes samples by the extensions of their members, like WebDataset.

    A sample is a dict of bytes by extension, as from ``TarDataset``: names that start
    with ``__``, and values that are not bytes, are left as they are. Or it is the bytes
    of an image, alone or first in a tuple with its label. ``txt``, ``cls``, ``id``,
    ``json``, ``npy``, ``npz``, ``pth`` and their synonyms are always decoded; bytes
    without a decoder stay bytes, pickles too, because they run code.

    Args:
        specs: In any order:

            - the type of all images: ``"pil"`` (``"pill"``, ``"pilrgba"``): Pillow
              images; ``"torch"`` (``"torchrgb"``, ``"torchl"``, ``"torchrgba"``):
              tensors ``(C, H, W)`` of float32 from 0 to 1; ``"rgb"`` (``"l"``,
              ``"rgba"``): arrays ``(H, W, C)``, for ``"l"`` ``(H, W)``, of float32 from
              0 to 1. With the suffix 8 (``"torchrgb8"``, ``"rgb8"``): uint8;
            - a dict: for each extension a function of bytes, or one of these words; it
              takes precedence, and the longest match wins (``"mask.png"`` before
              ``"png"``);
            - a function of ``".extension"`` and bytes, tried next; it returns None for
              extensions it does not decode, like WebDataset's handlers.

    Raises:
        ValueError: If a word is unknown.
        ImportError: If images are to be decoded, and Pillow is not installed.

    Example:
        >>> Decoder({"bin": len})({"__key__": "a", "cls": b"7", "bin": b"123"})
        {'__key__': 'a', 'cls': 7, 'bin': 3}
    """

    def __init__(self, *specs: Spec) -> None:
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
            for name, one in spec.items():
                function = _picture(one) if isinstance(one, str) else one
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
                functions pass through, with a note that names the sample.
            TypeError: If ``sample`` is not of a form that has bytes.
        """
        if isinstance(sample, Mapping):
            where = str(sample.get("__key__", "")), str(sample.get("__url__", ""))
            return {
                name: self.decode(value, name, *where)
                if is_buffer(value) and name[:2] != "__"
                else value
                for name, value in sample.items()
            }
        data, *others = sample if isinstance(sample, tuple) and sample else [sample]
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
        return (picture, *others) if isinstance(sample, tuple) else picture

    def decode(self, data: Any, extension: str, key: str = "", url: str = "") -> Any:
        """Return the decoded bytes of one member.

        Args:
            data: The bytes.
            extension: Such as ``"jpg"`` or ``"mask.png"``; empty: an image.
            key: Name of the sample, for errors.
            url: Address it was read from, for errors.
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
            what = f"{extension!r}" if extension else "an image"
            owner = f" of sample {key!r}" if key else ""
            where = f" in {url!r}" if url else ""
            place = f"{what}{owner}{where} ({len(data):,} bytes)"
            if is_own:
                text = f"cannot decode {place}: {type(error).__name__}: {error}"
                text += "; write it again, or skip it (on_error='skip')"
                raise DecodeError(text, location=url) from error
            error.add_note(f"aioloader: decoding {place}")
            raise

    def _named_for(self, extension: str) -> Callable[[bytes], Any] | None:
        """Return the user's function for an extension, or its longest ending."""
        while extension and self._named:
            if (function := self._named.get(extension)) is not None:
                return function
            extension = extension.partition(".")[2]
        return None

    def describe(self) -> dict[str, Any]:
        """Return the decoders, and the names of the user's functions."""
        words = {
            ext: one.spec if isinstance(one, Picture) else "function"
            for ext, one in sorted(self._named.items(), key=lambda item: item[0])
        }
        functions = {
            ext: name_of(one)
            for ext, one in self._named.items()
            if not isinstance(one, Picture)
        }
        return {
            "pictures": None if self._picture is None else self._picture.spec,
            "extensions": words,
            "handlers": len(self._functions),
            "function": [functions, *map(name_of, self._functions)],
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
