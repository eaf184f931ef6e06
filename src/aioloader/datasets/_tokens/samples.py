"""The arrays of training samples of a language model."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np

# Of integers or booleans, 1-D.
Array: TypeAlias = np.ndarray[Any, Any]
# The label that torch's ``cross_entropy`` ignores.
IGNORED = -100


def sample_of(
    tokens: Array,
    starts: Sequence[int],
    following: int | None = None,
    *,
    counts: Array | None = None,
    shift: bool = True,
) -> dict[str, Array]:
    """Return a sample: ``input_ids``, ``labels``, ``position_ids``, as int64.

    The label of a token is the next one of its document, or without ``shift`` (for
    models that shift labels) the token itself, unless it is a document's first.

    Args:
        tokens: Shape (length,), with padding.
        starts: Where documents and padding start, ascending; the first is 0.
        following: The token after the last one, if it is of the same document.
        counts: Which tokens are to be predicted, shape (length,), or (length + 1,) with
            ``following``: false for padding, and where a loss mask is. None: all.
        shift: Whether labels are the next tokens.
    """
    length, last = len(tokens), IGNORED if following is None else following
    if counts is not None:
        last = last if counts[length:].all() else IGNORED
        counts = counts[:length]
    sizes = [stop - start for start, stop in pairwise([*starts, length])]
    made = samples_of(tokens.astype(np.int64), sizes, [last], counts, shift=shift)
    return {name: array[0] for name, array in made.items()}


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
        counts: As for ``sample_of``, of all tokens.
        shift: As for ``sample_of``.
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
