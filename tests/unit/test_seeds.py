"""Seeds of batches and samples are the same on every system, in every release."""

from typing import Any

import pytest
import torch

from aioloader import DataLoader


class Seeds(list[int]):
    """Each sample is the seed with which it is read."""

    def __getitem__(self, _index: Any) -> Any:
        return torch.initial_seed()


@pytest.mark.parametrize(
    ("rng", "seeds"),
    [
        ("batch", [6273646018901070079, 6078295120203423313]),
        ("sample", [5802805015985019982, 4258545799932471854]),
    ],
)
def test_seeds_never_change(rng: Any, seeds: list[int]) -> None:
    """Today's runs can be repeated with future releases."""
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(Seeds([0]), rng=rng, num_workers=1, generator=generator)
    assert [int(batch) for _ in range(2) for batch in loader] == seeds
