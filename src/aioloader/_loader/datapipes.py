"""Torch's data pipes: what its loader does for them, done here too."""

from typing import Any

import torch
from torch.utils.data import IterDataPipe, graph_settings


def settle_shuffle(dataset: Any, shuffle: Any) -> tuple[Any, Any]:
    """Return the dataset and ``shuffle``; to an ``IterDataPipe`` that is applied."""
    if shuffle is None or not isinstance(dataset, IterDataPipe):
        return dataset, shuffle
    return graph_settings.apply_shuffle_settings(dataset, shuffle=shuffle), None


def seed_pipe(dataset: Any, generator: torch.Generator | None) -> None:
    """Seed the random steps of an ``IterDataPipe`` for an epoch."""
    seed = draw_seed(dataset, generator)
    if seed is not None:
        shared = torch.Generator().manual_seed(seed)
        graph_settings.apply_random_seed(dataset, shared)


def draw_seed(dataset: Any, generator: torch.Generator | None) -> int | None:
    """Draw the seed of an ``IterDataPipe``, which torch's workers draw twice."""
    if not isinstance(dataset, IterDataPipe):
        return None
    drawn = torch.empty((), dtype=torch.int64).random_(generator=generator)
    return int(drawn.item())
