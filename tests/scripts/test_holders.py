"""Datasets may hold the same objects as with torch's forked workers."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from aioloader import DataLoader
from scripts.holders import HOLDERS, Holding


def delivered(kind: Any, name: str, folder: Path) -> list[Any]:
    """Return the batches that two workers read from a new object of this kind."""
    make, use = HOLDERS[name]
    folder.mkdir()
    with ExitStack() as stack:
        dataset: Any = Holding(make(stack, folder), use)
        loader = kind(dataset, batch_size=2, num_workers=2, collate_fn=list)
        return list(loader)


@pytest.mark.slow
@pytest.mark.parametrize("name", HOLDERS)
def test_forked_workers_may_use_any_object(name: str, tmp_path: Path) -> None:
    """The batches are those of torch's workers."""
    theirs = delivered(torch.utils.data.DataLoader, name, tmp_path / "theirs")
    ours = delivered(DataLoader, name, tmp_path / "ours")
    assert [len(batch) for batch in theirs] == [2, 2, 2]
    assert repr(ours) == repr(theirs)
