"""Data for language models: tokens of texts, arrays of samples, and files of tokens.

A file is a run of integers; ``FILE.json`` next to it, the sidecar, has their type, the
token that ends documents, and what resuming a writer needs. Megatron's ``.idx`` has a
head, the sizes of sequences (int32), their byte offsets (int64) and the first sequence
of each document (int64, with the number of sequences at the end), little-endian.
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

# Of integers or booleans, 1-D.
Array: TypeAlias = np.ndarray[Any, Any]
# The label that torch's ``cross_entropy`` ignores.
IGNORED = -100
# What makes tokens of each of several texts.
EncodeTexts: TypeAlias = Callable[[list[str]], Any]
_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEAD = struct.Struct("<9sQBQQ")
# Those of floats, 6 and 7, hold no tokens.
_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
_SIDECAR_VERSION = 1
_OTHER = (
    "{where} was started with another {what}; remove it, with its hidden '.partial' "
    "files, or write to another path"
)
# Sequences of an index that is written at a time.
_AT_ONCE = 1 << 18
# Documents of an index that are checked when the first of them is needed.
_CHECKED_AT_ONCE = 256
# Returns the version of a file, or raises a FileNotFoundError; returns some bytes.
VersionOf = Callable[[Address], Version]
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
        sizes: Those of the pieces of documents, and of padding, in the samples.
        following: Each sample's last label, if labels are shifted.
        counts: Which tokens are to be predicted: false for padding, and where a loss
            mask is. None: all.
        shift: Whether labels are the next tokens of the same document; if not, they are
            the tokens themselves, for models that shift labels.
    """
    total, samples = len(tokens), len(following)
    length = total // samples
    targets = np.empty(total + 1, np.int64)
    targets[:total] = tokens
    if counts is not None:
        targets[:total][~counts] = IGNORED
    # A document's first token is predicted by none.
    targets[[*accumulate(sizes[:-1], initial=0)]] = IGNORED
    labels = targets[1:] if shift else targets[:total]
    if shift:
        labels[length - 1 :: length] = following
    places = np.arange(length)
    positions = np.concatenate([places[:size] for size in sizes])
    made = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    return {name: array.reshape(samples, -1) for name, array in made.items()}


class Tokenizer:
    """A copy of a ``tokenizers.Tokenizer``, which nothing else changes.

    ``saved`` is its ``to_str``. If it ``splits``, special tokens in a text are text.
    ``described`` tells its vocabulary and settings from others, in any process.
    """

    def __init__(self, saved: str, *, splits: bool, truncates: bool = True) -> None:
        made = importlib.import_module("tokenizers").Tokenizer.from_str(saved)
        made.no_padding()  # which depends on the other texts of a batch
        if not truncates:
            made.no_truncation()
        made.encode_special_tokens = splits
        digest = hashlib.sha256(f"{splits}{made.to_str()}".encode()).hexdigest()
        self._tokenizer = made
        self.described: str = f"{made.get_vocab_size():,} tokens, {digest[:16]}"

    def __call__(self, texts: list[str]) -> list[Array]:
        found = self._tokenizer.encode_batch_fast(texts)  # without offsets
        return [np.array(one.ids, np.int64) for one in found]

    def __reduce__(self) -> tuple[Any, ...]:
        made = self._tokenizer
        splits = made.encode_special_tokens  # which its own pickles lack
        return partial(type(self), splits=splits), (made.to_str(),)


def tokenizer_of(tokenizer: Any) -> Tokenizer | None:
    """Return a copy of a tokenizer of Hugging Face; None if it is something else.

    One that has parts in Python cannot be copied: that raises its own error.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    module = sys.modules.get("tokenizers")  # there if it is one
    if module and isinstance(backend, module.implementations.BaseTokenizer):
        tokenizer = backend = getattr(backend, "_tokenizer", None)
    if module is None or not isinstance(backend, module.Tokenizer):
        return None
    # A call of one of transformers sets these first, and truncates only if asked to.
    splits = getattr(tokenizer, "split_special_tokens", backend.encode_special_tokens)
    truncates = backend is tokenizer
    return Tokenizer(backend.to_str(), splits=splits, truncates=truncates)


def text_of(sample: Any, column: str | None) -> str:
    """Return a text, or the one in a column of a sample.

    A TypeError if there is something else, a KeyError if there is no such column.
    """
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
    """Return the tokens of each text.

    A TypeError if they are not integers in one dimension, a ValueError if there are
    not as many arrays as texts.
    """
    if not texts:
        return []
    found = encode(texts)
    if isinstance(found, Mapping):  # of a tokenizer of transformers
        found = found["input_ids"]
    if len(found) != len(texts):
        raise ValueError(
            f"the tokenizer returned {len(found)} arrays of tokens for {len(texts)} "
            "texts; return one for each"
        )
    return [_array_of(tokens) for tokens in found]


def _array_of(tokens: Any) -> Array:
    array = np.asarray(tokens)
    if not array.size and isinstance(tokens, Sequence):  # would be of floats
        array = np.asarray(tokens, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(
            "the tokens of a text must be integers in one dimension, got "
            f"{array.dtype} of shape {array.shape}"
        )
    return array


def dtype_of(dtype: Any) -> np.dtype[Any]:
    """Return an integer type; a ValueError if it is none."""
    found: np.dtype[Any] | None = None
    with contextlib.suppress(TypeError):
        found = np.dtype(dtype)
    if found is None or found.kind not in "iu":
        raise ValueError(
            f"dtype must be an integer type such as 'uint16', got {dtype!r}"
        )
    return found


def check_fits(token: int, dtype: np.dtype[Any], name: str) -> None:
    """Raise a ValueError if tokens of a type cannot have this value."""
    limits = np.iinfo(dtype)
    if not limits.min <= token <= limits.max:
        raise ValueError(
            f"{name} is {token:,}, and {dtype.name} holds {limits.min:,} to "
            f"{limits.max:,}"
        )


def code_of(dtype: np.dtype[Any]) -> int:
    """Return Megatron's number of a type; a ValueError if it has none."""
    if dtype.name not in _CODES:
        raise ValueError(f"Megatron has {', '.join(_CODES)}, got {dtype.name}")
    return _CODES[dtype.name]


@dataclass(frozen=True)
class Sidecar:
    """What a writer says of a file of tokens, finished or not."""

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
    def loaded(cls, text: bytes, location: str) -> "Sidecar":
        """Return what JSON says; a ValueError if it is of something else."""
        try:
            content = json.loads(text)
            is_known = content.pop("version") == _SIDECAR_VERSION
            found = cls(**content)
            for number in (found.documents, found.tokens, found.eos):
                operator.index(0 if number is None else number)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{location!r} is not the sidecar of a file of tokens: {error!r}; "
                "write both again"
            ) from error
        if not is_known:
            raise ValueError(f"{location!r} is of another version: write it again")
        return found

    @classmethod
    def beside(
        cls, path: Address, version: Version, look: VersionOf, read: ReadRange
    ) -> "Sidecar | None":
        """Return that of a finished file, if it has one, as ``loaded`` does."""
        location = _added(path, ".json")
        told = _looked(look, location)
        if told is None:
            return None
        found = cls.loaded(read(location, 0, told.size), location)
        dtype = dtype_of(found.dtype)
        if found.tokens * dtype.itemsize != version.size:
            raise ValueError(
                f"{path!r} has {version.size:,} bytes, and its sidecar says "
                f"{found.tokens:,} tokens of {dtype}: it is cut, or of another "
                "dataset; copy both again"
            )
        return found

    def resumed(self, text: bytes, location: str) -> "Sidecar":
        """Return how far an earlier writer of the same tokens got.

        A StateMismatchError if it wrote something else.
        """
        found = self.loaded(text, location)
        begun = asdict(found)
        del begun["documents"], begun["tokens"]
        check_same(begun, json.loads(self.dump()), _OTHER, repr(location))
        return found


class Index(NamedTuple):
    """The head of an ``.idx``; offsets are in bytes."""

    address: Address
    version: Version
    dtype: np.dtype[Any]
    sequences: int
    entries: int  # number of documents, and one

    @property
    def pointers_at(self) -> int:
        return _HEAD.size + 4 * self.sequences

    @property
    def firsts_at(self) -> int:
        return self.pointers_at + 8 * self.sequences

    @property
    def end(self) -> int:
        return self.firsts_at + 8 * self.entries

    @classmethod
    def found(cls, address: Address, version: Version, read: ReadRange) -> "Index":
        """Return what the head says.

        A ValueError if the file is of another kind or version, or is cut.
        """
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
        made = cls(address, version, np.dtype(names[0]), sequences, entries)
        # With modes, a byte for each sequence.
        if not entries or size not in {made.end, made.end + sequences}:
            raise ValueError(
                f"{address!r} has {size:,} bytes, and an index of {sequences:,} "
                f"sequences and {entries:,} ends has {made.end:,}: it is cut, or was "
                "not finished; copy or write it again"
            )
        return made

    def check(self, read: ReadRange, size: int) -> None:
        """Check that first and last sequence and document fit the size of the ``.bin``.

        ``read`` reads the index.
        """
        at, stop = self.firsts_at - 8, 0
        if self.sequences:
            last, start = self._numbers(read, "<iq", self.pointers_at - 4)
            stop, opens = self._numbers(read, "<qq", at)
            stop += last * self.dtype.itemsize
        else:
            start, (opens,) = 0, self._numbers(read, "<q", at + 8)
        (closes,) = self._numbers(read, "<q", self.end - 8)
        if start or opens or closes != self.sequences:
            raise ValueError(
                f"{self.address!r} is damaged: it starts at byte {start:,} with "
                f"sequence {opens:,}, and ends with {closes:,} of {self.sequences:,}; "
                "write it again"
            )
        if stop != size:
            raise ValueError(
                f"{self.address!r} has sizes that make {stop:,} bytes, and the .bin "
                f"has {size:,}: copy or write both again"
            )

    def _numbers(self, read: ReadRange, form: str, at: int) -> tuple[int, ...]:
        return struct.unpack(form, read(self.address, at, at + struct.calcsize(form)))


class Documents:
    """Where the documents of a mapped ``.idx`` start; looked up, never read whole."""

    def __init__(self, buffer: Buffer, index: Index) -> None:
        view = memoryview(buffer)
        self._index = index
        self._sizes = view[_HEAD.size : index.pointers_at].cast("i")
        # Numbers are not aligned: numpy would copy all to search them, this does not.
        self._pointers = view[index.pointers_at : index.firsts_at].cast("q")
        self._firsts = view[index.firsts_at : index.end].cast("q")
        # Without empty documents at the end, which start at no sequence.
        self._count = count = bisect_left(self._firsts, index.sequences)
        self._checked = bytearray(count // _CHECKED_AT_ONCE + 1)
        if self._firsts[count] != index.sequences:
            self._check(0, index.entries)

    def between(self, start: int, stop: int) -> list[int]:
        """Return where documents start after ``start``, up to and with ``stop``.

        Counted in tokens, from ``start`` on. A DatasetError if the index is damaged.
        """
        pointers, firsts, count = self._pointers, self._firsts, self._count
        key, itemsize = pointers.__getitem__, self._index.dtype.itemsize
        try:
            low = bisect_right(firsts, start * itemsize, 0, count, key=key)
            high = bisect_right(firsts, stop * itemsize, low, count, key=key)
        except IndexError:
            self._check(0, count)
            raise
        # A damaged entry that led the search astray is next to where it ended.
        block, last = (
            max(low - 2, 0) // _CHECKED_AT_ONCE,
            (high + 1) // _CHECKED_AT_ONCE,
        )
        while (block := self._checked.find(0, block, last + 1)) >= 0:
            at = block * _CHECKED_AT_ONCE
            self._check(at, min(at + _CHECKED_AT_ONCE, count))
            self._checked[block] = 1
        return [pointers[one] // itemsize - start for one in firsts[low:high]]

    def _check(self, low: int, high: int) -> None:
        """Check that documents start in order, and where the sequence before ends."""
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
    """Yield the bytes of an index, whose documents are one sequence each.

    Their sizes, as int32, are read twice.
    """
    yield _HEAD.pack(_MAGIC, _VERSION, code_of(dtype), documents, documents + 1)
    sizes.seek(0)
    while piece := sizes.read(4 * _AT_ONCE):
        yield piece
    sizes.seek(0)
    at = 0
    while piece := sizes.read(4 * _AT_ONCE):
        ends = at + np.cumsum(np.frombuffer(piece, "<i4"), dtype="<i8") * dtype.itemsize
        yield np.concatenate([[at], ends[:-1]]).astype("<i8").tobytes()
        at = int(ends[-1])
    for first in range(0, documents + 1, _AT_ONCE):
        last = min(first + _AT_ONCE, documents + 1)
        yield np.arange(first, last, dtype="<i8").tobytes()


@dataclass(frozen=True)
class TokenFile:
    """What is known of a file of tokens before any is read."""

    address: Address
    version: Version
    dtype: np.dtype[Any]
    eos: int | None  # the token that ends a document, if it is known
    index: Index | None  # where documents start; None: ``eos`` says it, or nothing

    @property
    def tokens(self) -> int:
        return self.version.size // self.dtype.itemsize

    @classmethod
    def found(
        cls,
        path: Address,
        dtype: Any,
        eos: int | None,
        look: VersionOf,
        read: ReadRange,
    ) -> "TokenFile":
        """Return the file of a path, which may be Megatron's without its ending.

        A FileNotFoundError if there is none; a ValueError if the type is not known, or
        files do not fit together.
        """
        given = None if dtype is None else dtype_of(dtype)
        tokens, idx = megatron_pair(path)
        version = None if path == idx else _looked(look, path)
        # A file that exists and is no .bin has no index.
        is_flat = version is not None and path != tokens
        told = None if is_flat else _looked(look, idx)
        path = path if told is None else tokens
        version = version or look(path)
        said = Sidecar.beside(path, version, look, read)
        ends = said.eos if said and eos is None else eos
        if told is None:
            found = given if said is None else dtype_of(said.dtype)
            if found is None:
                raise ValueError(
                    f"the type of the tokens in {path!r} is not known, without an .idx "
                    "or the sidecar of a TokenWriter: pass dtype, such as 'uint16'"
                )
            made = cls(path, version, found, ends, None)
        else:
            index = Index.found(idx, told, read)
            index.check(read, version.size)
            # A caller who names the token that ends documents wants it to decide.
            decides = index if eos is None else None
            made = cls(path, version, index.dtype, ends, decides)
        if given is not None and given != made.dtype:
            raise ValueError(
                f"dtype is {given}, and {path!r} has tokens of {made.dtype}, as the "
                "file next to it says"
            )
        if made.eos is not None:
            check_fits(made.eos, made.dtype, "eos")
        if made.version.size % made.dtype.itemsize:
            raise ValueError(
                f"{path!r} has {made.version.size:,} bytes and ends inside a token of "
                f"{made.dtype}: copy it again, or pass its dtype"
            )
        return made


def megatron_pair(path: Address) -> tuple[Address, Address]:
    """Return the ``.bin`` and ``.idx`` of the path of either, or without an ending."""
    stem = sibling(path, lambda name: re.sub(r"\.(bin|idx)$", "", name))
    return _added(stem, ".bin"), _added(stem, ".idx")


def _added(address: Address, ending: str) -> Address:
    return sibling(address, lambda name: name + ending)


def _looked(look: VersionOf, address: Address) -> Version | None:
    """Return the version of a file, or None; stores may refuse what is not there."""
    try:
        return look(address)
    except (FileNotFoundError, PermissionError):
        return None
