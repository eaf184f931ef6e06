"""The arrays of training samples of a language model."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

# Of integers or booleans, 1-D.
Array: TypeAlias = np.ndarray[Any, Any]
# The label that torch's ``cross_entropy`` ignores.
IGNORED = -100


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
