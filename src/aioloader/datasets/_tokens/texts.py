"""Texts to tokens, by tokenizers of Hugging Face or any function of several texts."""

import hashlib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

# Of integers or booleans, 1-D.
Array: TypeAlias = np.ndarray[Any, Any]
# The label that torch's ``cross_entropy`` ignores.
IGNORED = -100
# What makes tokens of each of several texts.
Encode: TypeAlias = Callable[[list[str]], Any]


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


def encoded(encode: Encode, texts: list[str]) -> list[Array]:
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
