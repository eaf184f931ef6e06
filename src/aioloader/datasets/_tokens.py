"""Tokenizers, sample arrays and token files for language models.

A token file is an array of tokens. The sidecar ``FILE.json`` records their type, the
token that ends documents, and what resuming a writer needs. Megatron's ``.idx`` has
a header, the sizes of sequences (int32), their byte offsets (int64), and the number of
each document's first sequence (int64) with a final total, all little-endian.
Source: megatron/core/datasets/indexed_dataset.py of NVIDIA/Megatron-LM.
"""

import contextlib
import hashlib
import importlib
import json
import operator
import re
import struct
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
from typing_extensions import Buffer

from aioloader.datasets._checks import check_same
from aioloader.datasets._stores.addresses import Address, sibling
from aioloader.datasets._stores.failures import Version
from aioloader.errors import DatasetError

# An array of integers or booleans.
Array: TypeAlias = np.ndarray[Any, Any]
# The label that torch's ``cross_entropy`` ignores.
IGNORED = -100
# Returns the tokens of each text.
EncodeTexts: TypeAlias = Callable[[list[str]], Any]
_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEAD = struct.Struct("<9sQBQQ")
# Megatron's type codes; 6 and 7 are floats, which tokens never are.
_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
_SIDECAR_VERSION = 1
_MISMATCH = (
    "{where} was started with another {what}; remove it, with its hidden '.partial' "
    "files, or write to another path"
)
# Sequences of an index to write at once.
_WRITE_CHUNK = 1 << 18
# Documents of an index to check at once, when the first of them is needed.
_CHECK_CHUNK = 256
# Returns the version of a file, or raises a FileNotFoundError.
VersionOf = Callable[[Address], Version]
# Returns the bytes of a file between two offsets.
ReadRange = Callable[[Address, int, int], bytes]


def samples_of(
    tokens: Array,
    sizes: Sequence[int],
    following: Sequence[int],
    counts: Array | None = None,
    *,
    shift: bool = True,
) -> dict[str, Array]:
    """Return the arrays of several samples of one length, shape (samples, length).

    Args:
        tokens: All samples' tokens, int64; ``input_ids`` shares their memory.
        sizes: The length of each piece of a document or of padding, in order.
        following: Each sample's last label, if labels are shifted.
        counts: Booleans from loss masks, true for tokens to predict. None: predict all
            tokens. The caller masks padding.
        shift: Whether labels are the next tokens of the same document. Otherwise they
            are the tokens themselves, for models that shift labels.
    """
    total, samples = len(tokens), len(following)
    length = total // samples
    targets = np.empty(total + 1, np.int64)
    targets[:total] = tokens
    if counts is not None:
        targets[:total][~counts] = IGNORED
    # No token predicts a document's first token.
    targets[[*accumulate(sizes[:-1], initial=0)]] = IGNORED
    labels = targets[1:] if shift else targets[:total]
    if shift:
        labels[length - 1 :: length] = following
    places = np.arange(length)
    positions = np.concatenate([places[:size] for size in sizes])
    made = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    return {name: array.reshape(samples, -1) for name, array in made.items()}


class Tokenizer:
    """A private copy of a ``tokenizers.Tokenizer``, so that its settings stay fixed.

    ``saved`` is the original's ``to_str()``. ``splits`` treats special tokens as text;
    ``truncates`` keeps truncation. ``described`` identifies vocabulary and settings.
    """

    def __init__(self, saved: str, *, splits: bool, truncates: bool = True) -> None:
        made = importlib.import_module("tokenizers").Tokenizer.from_str(saved)
        made.no_padding()  # padding depends on the other texts of a batch
        if not truncates:
            made.no_truncation()
        made.encode_special_tokens = splits
        digest = hashlib.sha256(f"{splits}{made.to_str()}".encode()).hexdigest()
        self._tokenizer = made
        self.described: str = f"{made.get_vocab_size():,} tokens, {digest[:16]}"

    def __call__(self, texts: list[str]) -> list[Array]:
        encodings = self._tokenizer.encode_batch_fast(texts)  # without offsets
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def __reduce__(self) -> tuple[Any, ...]:
        made = self._tokenizer
        splits = made.encode_special_tokens  # the library's pickles lack this setting
        return partial(type(self), splits=splits), (made.to_str(),)


def tokenizer_of(tokenizer: Any) -> Tokenizer | None:
    """Return a copy of a Hugging Face tokenizer; None for anything else.

    Raise the tokenizer's own error if Python components prevent a copy.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    module = sys.modules.get("tokenizers")  # imported if it is a tokenizer
    if module and isinstance(backend, module.implementations.BaseTokenizer):
        tokenizer = backend = getattr(backend, "_tokenizer", None)
    if module is None or not isinstance(backend, module.Tokenizer):
        return None
    # Calls of transformers' tokenizers set these first, and truncate only if asked to.
    splits = getattr(tokenizer, "split_special_tokens", backend.encode_special_tokens)
    truncates = backend is tokenizer
    return Tokenizer(backend.to_str(), splits=splits, truncates=truncates)


def text_of(sample: Any, column: str | None) -> str:
    """Return the sample's ``column``, or the sample; raise an error if not a string."""
    if column is not None:
        if not isinstance(sample, Mapping):
            raise TypeError(
                f"tokenize() needs samples with a column {column!r}, got one of type "
                f"{type(sample).__name__!r}"
            )
        if column not in sample:
            raise KeyError(
                f"tokenize() found no column {column!r} in a sample of {[*sample]}; "
                "pass the column of the texts"
            )
        sample = sample[column]
    if isinstance(sample, str):
        return sample
    raise TypeError(
        f"tokenize() needs texts, got one of type {type(sample).__name__!r}; decode "
        "bytes, and name the column of the texts in rows or dicts"
    )


def encoded(encode: EncodeTexts, texts: list[str]) -> list[Array]:
    """Return the tokens of each text; raise an error unless they are 1-D integers."""
    if not texts:
        return []
    arrays = encode(texts)
    if isinstance(arrays, Mapping):  # from a tokenizer of transformers
        arrays = arrays["input_ids"]
    if len(arrays) != len(texts):
        raise ValueError(
            f"the tokenizer returned {len(arrays)} arrays of tokens for {len(texts)} "
            "texts; return one for each"
        )
    return [_array_of(tokens) for tokens in arrays]


def _array_of(tokens: Any) -> Array:
    array = np.asarray(tokens)
    if not array.size and isinstance(tokens, Sequence):  # NumPy would choose floats
        array = np.asarray(tokens, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(
            "the tokens of a text must be integers in one dimension, got "
            f"{array.dtype} of shape {array.shape}"
        )
    return array


def dtype_of(dtype: Any) -> np.dtype[Any]:
    """Return a NumPy dtype; raise a ValueError if it is not an integer type."""
    with contextlib.suppress(TypeError):
        result: np.dtype[Any] = np.dtype(dtype)
        if result.kind in "iu":
            return result
    raise ValueError(f"dtype must be an integer type such as 'uint16', got {dtype!r}")


def check_fits(token: int, dtype: np.dtype[Any], name: str) -> None:
    """Raise a ValueError that mentions ``name`` if ``dtype`` cannot hold ``token``."""
    limits = np.iinfo(dtype)
    if not limits.min <= token <= limits.max:
        raise ValueError(
            f"{name} is {token:,}, and {dtype.name} holds {limits.min:,} to "
            f"{limits.max:,}"
        )


def code_of(dtype: np.dtype[Any]) -> int:
    """Return Megatron's code for a dtype; raise a ValueError if it has none."""
    if dtype.name not in _CODES:
        raise ValueError(f"Megatron has {', '.join(_CODES)}, got {dtype.name}")
    return _CODES[dtype.name]


@dataclass(frozen=True)
class Sidecar:
    """A writer's description of a token file, which may be unfinished."""

    format: str  # "flat" or "megatron"
    dtype: str  # its name; little-endian
    eos: int | None  # the token that ends each document
    metadata: Mapping[str, Any]  # the user's description of the documents' origin
    documents: int = 0
    tokens: int = 0

    def dump(self) -> bytes:
        content = {"version": _SIDECAR_VERSION, **asdict(self)}
        return (json.dumps(content, indent=1) + "\n").encode()

    @classmethod
    def parsed(cls, text: bytes, location: str) -> "Sidecar":
        """Parse a sidecar's JSON text; raise a ValueError if it is not a sidecar."""
        try:
            content = json.loads(text)
            is_known = content.pop("version") == _SIDECAR_VERSION
            sidecar = cls(**content)
            for number in (sidecar.documents, sidecar.tokens, sidecar.eos):
                operator.index(0 if number is None else number)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{location!r} is not the sidecar of a file of tokens: {error!r}; "
                "write both again"
            ) from error
        if not is_known:
            raise ValueError(f"{location!r} is of another version: write it again")
        return sidecar

    @classmethod
    def of_file(
        cls, path: Address, version: Version, version_of: VersionOf, read: ReadRange
    ) -> "Sidecar | None":
        """Return the sidecar of ``path`` or None; raise a ValueError if it is wrong."""
        location = _with_ending(path, ".json")
        own = _version_if_any(version_of, location)
        if own is None:
            return None
        sidecar = cls.parsed(read(location, 0, own.size), location)
        dtype = dtype_of(sidecar.dtype)
        if sidecar.tokens * dtype.itemsize != version.size:
            raise ValueError(
                f"{path!r} has {version.size:,} bytes, and its sidecar says "
                f"{sidecar.tokens:,} tokens of {dtype}: it is cut, or of another "
                "dataset; copy both again"
            )
        return sidecar

    def resumed(self, text: bytes, location: str) -> "Sidecar":
        """Return an earlier writer's sidecar; raise an error if its settings differ."""
        earlier = self.parsed(text, location)
        begun = asdict(earlier)
        del begun["documents"], begun["tokens"]
        check_same(begun, json.loads(self.dump()), _MISMATCH, repr(location))
        return earlier


class Index(NamedTuple):
    """The header of a Megatron ``.idx``; offsets are in bytes."""

    address: Address
    version: Version
    dtype: np.dtype[Any]
    sequences: int
    entries: int  # the number of documents + 1

    @property
    def pointers_start(self) -> int:
        """The byte at which the list of sequences' offsets starts in the file."""
        return _HEAD.size + 4 * self.sequences

    @property
    def firsts_start(self) -> int:
        """The byte at which the list of documents' first sequences starts."""
        return self.pointers_start + 8 * self.sequences

    @property
    def end(self) -> int:
        return self.firsts_start + 8 * self.entries

    @classmethod
    def of_file(cls, address: Address, version: Version, read: ReadRange) -> "Index":
        """Read a header; raise a ValueError if the file is cut or of another format."""
        size = version.size
        head = read(address, 0, min(size, _HEAD.size)).ljust(_HEAD.size, b"\0")
        magic, number, code, sequences, entries = _HEAD.unpack(head)
        if magic != _MAGIC:
            raise ValueError(f"{address!r} is not an index of Megatron; write it again")
        if number != _VERSION:
            raise ValueError(
                f"{address!r} is an index of version {number}; only {_VERSION} is "
                "known: write it again"
            )
        names = [name for name, known in _CODES.items() if known == code]
        if not names:
            raise ValueError(
                f"{address!r} has no integers, but type {code}: pass tokens"
            )
        index = cls(address, version, np.dtype(names[0]), sequences, entries)
        # At the end, each sequence may have a mode of one byte.
        if not entries or size not in {index.end, index.end + sequences}:
            raise ValueError(
                f"{address!r} has {size:,} bytes, and an index of {sequences:,} "
                f"sequences and {entries:,} ends has {index.end:,}: it is cut, or was "
                "not finished; copy or write it again"
            )
        return index

    def check(self, read: ReadRange, size: int) -> None:
        """Raise a ValueError if the first or last entries do not fit the ``.bin``."""
        last_pointer, stop = self.firsts_start - 8, 0
        if self.sequences:
            last_size, start = self._numbers(read, "<iq", self.pointers_start - 4)
            stop, first = self._numbers(read, "<qq", last_pointer)
            stop += last_size * self.dtype.itemsize
        else:
            start, (first,) = 0, self._numbers(read, "<q", self.firsts_start)
        (last,) = self._numbers(read, "<q", self.end - 8)
        if start or first or last != self.sequences:
            raise ValueError(
                f"{self.address!r} is damaged: it starts at byte {start:,} with "
                f"sequence {first:,}, and ends with {last:,} of {self.sequences:,}; "
                "write it again"
            )
        if stop != size:
            raise ValueError(
                f"{self.address!r} has sizes that make {stop:,} bytes, and the .bin "
                f"has {size:,}: copy or write both again"
            )

    def _numbers(self, read: ReadRange, form: str, start: int) -> tuple[int, ...]:
        stop = start + struct.calcsize(form)
        return struct.unpack(form, read(self.address, start, stop))


class Documents:
    """The starts of documents in a mapped ``.idx``, which is not read whole."""

    def __init__(self, buffer: Buffer, index: Index) -> None:
        view = memoryview(buffer)
        self._index = index
        self._sizes = view[_HEAD.size : index.pointers_start].cast("i")
        # Numbers are not aligned: NumPy would copy all of them before a search.
        self._pointers = view[index.pointers_start : index.firsts_start].cast("q")
        self._firsts = view[index.firsts_start : index.end].cast("q")
        # The number of documents except empty ones at the end, which have no sequence.
        self._count = count = bisect_left(self._firsts, index.sequences)
        self._checked = bytearray(count // _CHECK_CHUNK + 1)
        if self._firsts[count] != index.sequences:
            self._check(0, index.entries)

    def between(self, start: int, stop: int) -> list[int]:
        """Return document starts after token ``start``, up to and including ``stop``.

        Starts are token offsets from ``start``. A damaged index raises a DatasetError.
        """
        pointers, firsts, count = self._pointers, self._firsts, self._count
        key, itemsize = pointers.__getitem__, self._index.dtype.itemsize
        try:
            low = bisect_right(firsts, start * itemsize, 0, count, key=key)
            high = bisect_right(firsts, stop * itemsize, low, count, key=key)
        except IndexError:
            self._check(0, count)
            raise
        # A damaged entry that misled the search is next to its result.
        chunk, last = max(low - 2, 0) // _CHECK_CHUNK, (high + 1) // _CHECK_CHUNK
        while (chunk := self._checked.find(0, chunk, last + 1)) >= 0:
            first = chunk * _CHECK_CHUNK
            self._check(first, min(first + _CHECK_CHUNK, count))
            self._checked[chunk] = 1
        return [pointers[k] // itemsize - start for k in firsts[low:high]]

    def _check(self, low: int, high: int) -> None:
        """Check that each document starts where the previous sequence ended."""
        address, _, dtype, sequences, _ = self._index
        before = max(0, self._firsts[low - 1]) if low else 0
        firsts = np.frombuffer(self._firsts[low:high], np.int64)
        if (np.diff(firsts, prepend=before) >= 0).all() and (firsts < sequences).all():
            inner = firsts[firsts > 0]
            pointers = np.frombuffer(self._pointers, np.int64)
            sizes = np.frombuffer(self._sizes, np.int32)[inner - 1].astype(np.int64)
            starts, ends = pointers[inner], pointers[inner - 1] + sizes * dtype.itemsize
            if (starts == ends).all():
                return
        for number, first in enumerate(firsts.tolist(), low):
            start = end = 0
            if (is_known := before <= first < sequences) and first:
                start = self._pointers[first]
                end = (
                    self._pointers[first - 1] + self._sizes[first - 1] * dtype.itemsize
                )
            if start != end or not (is_known or before <= first == sequences):
                raise DatasetError(
                    f"{address!r} is damaged: document {number:,} starts with sequence "
                    f"{first:,} of {sequences:,}, after {before:,}, at byte {start:,}, "
                    f"after {end:,}; write the index again",
                    location=address,
                )
            before = first


def index_of(dtype: np.dtype[Any], documents: int, sizes: BinaryIO) -> Iterator[bytes]:
    """Yield an index with one sequence per document; ``sizes`` is a file of int32."""
    yield _HEAD.pack(_MAGIC, _VERSION, code_of(dtype), documents, documents + 1)
    sizes.seek(0)
    while piece := sizes.read(4 * _WRITE_CHUNK):
        yield piece
    sizes.seek(0)
    end = 0
    while piece := sizes.read(4 * _WRITE_CHUNK):
        lengths = np.frombuffer(piece, "<i4")
        ends = end + np.cumsum(lengths, dtype="<i8") * dtype.itemsize
        yield np.concatenate([[end], ends[:-1]]).astype("<i8").tobytes()
        end = int(ends[-1])
    for first in range(0, documents + 1, _WRITE_CHUNK):
        last = min(first + _WRITE_CHUNK, documents + 1)
        yield np.arange(first, last, dtype="<i8").tobytes()


@dataclass(frozen=True)
class TokenFile:
    """A description of a token file, made before any token is read."""

    address: Address
    version: Version
    dtype: np.dtype[Any]
    eos: int | None  # the token that ends a document, if it is known
    index: Index | None  # where documents start; if None, see ``eos``

    @property
    def tokens(self) -> int:
        return self.version.size // self.dtype.itemsize

    @classmethod
    def find(
        cls,
        path: Address,
        dtype: Any,
        eos: int | None,
        version_of: VersionOf,
        read: ReadRange,
    ) -> "TokenFile":
        """Return the token file at ``path``, which may lack ``.bin`` or ``.idx``.

        Raise a FileNotFoundError if the file is missing, and a ValueError if its dtype
        is unknown or if ``dtype``, ``eos``, the ``.idx`` or the sidecar does not fit.
        """
        given = None if dtype is None else dtype_of(dtype)
        tokens, idx = megatron_pair(path)
        version = None if path == idx else _version_if_any(version_of, path)
        # A file that exists and is not a .bin has no index.
        is_flat = version is not None and path != tokens
        idx_version = None if is_flat else _version_if_any(version_of, idx)
        path = path if idx_version is None else tokens
        version = version or version_of(path)
        sidecar = Sidecar.of_file(path, version, version_of, read)
        end = sidecar.eos if sidecar and eos is None else eos
        if idx_version is None:
            known = given if sidecar is None else dtype_of(sidecar.dtype)
            if known is None:
                raise ValueError(
                    f"the type of the tokens in {path!r} is not known, without an .idx "
                    "or the sidecar of a TokenWriter: pass dtype, such as 'uint16'"
                )
            file = cls(path, version, known, end, None)
        else:
            index = Index.of_file(idx, idx_version, read)
            index.check(read, version.size)
            # An ``eos`` that was passed replaces the index.
            file = cls(path, version, index.dtype, end, index if eos is None else None)
        if given is not None and given != file.dtype:
            raise ValueError(
                f"dtype is {given}, and {path!r} has tokens of {file.dtype}, as the "
                "file next to it says"
            )
        if file.eos is not None:
            check_fits(file.eos, file.dtype, "eos")
        if file.version.size % file.dtype.itemsize:
            raise ValueError(
                f"{path!r} has {file.version.size:,} bytes and ends inside a token of "
                f"{file.dtype}: copy it again, or pass its dtype"
            )
        return file


def megatron_pair(path: Address) -> tuple[Address, Address]:
    """Return the ``.bin`` and ``.idx`` paths of ``path``, with or without ending."""
    stem = sibling(path, lambda name: re.sub(r"\.(bin|idx)$", "", name))
    return _with_ending(stem, ".bin"), _with_ending(stem, ".idx")


def _with_ending(address: Address, ending: str) -> Address:
    return sibling(address, lambda name: name + ending)


def _version_if_any(version_of: VersionOf, address: Address) -> Version | None:
    """Return a file's version; None if the file is missing or access is refused."""
    try:
        return version_of(address)
    except (FileNotFoundError, PermissionError):
        return None
