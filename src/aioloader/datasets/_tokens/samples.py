"""The arrays of one training sample of a language model."""

from collections.abc import Sequence
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
    length, first = len(tokens), np.asarray(starts, np.int64)
    inputs = tokens.astype(np.int64)
    # Every document's first token is predicted by none.
    targets = inputs if following is None else np.append(inputs, following)
    labels = targets.copy()
    if counts is not None:
        labels[~counts] = IGNORED
    labels[first] = IGNORED
    if shift:
        labels = labels[1:]
        if following is None:
            labels = np.append(labels, IGNORED)
    sizes = np.diff(first, append=length)
    positions = np.arange(length) - np.repeat(first, sizes)
    return {
        "input_ids": inputs,
        "labels": labels[:length],
        "position_ids": positions,
    }
