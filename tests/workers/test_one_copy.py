"""A big dataset is in memory once, or twice with a fork server: not in each worker."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioloader import DataLoader
from faulty import parent_of

WORKERS = 4
ROWS, COLUMNS = 1024, 1 << 18  # 1 GiB of float32


class Rows:
    """Sums of the rows of an array: every page is read."""

    def __init__(self) -> None:
        self.rows = np.ones((ROWS, COLUMNS), np.float32)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return self.rows[index].sum()


def below(pid: int) -> list[int]:
    """Return a process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            children.setdefault(parent_of(int(entry.name)), []).append(int(entry.name))
        except OSError:
            continue
    tree = [pid]
    for parent in tree:  # it grows
        tree += children.get(parent, [])
    return tree


def pss_gb() -> float:
    """Return the memory of this process and its descendants, without duplicates."""
    total = 0
    for pid in below(os.getpid()):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii")
        except OSError:  # it ended meanwhile
            continue
        total += sum(int(x.split()[1]) for x in text.splitlines() if x[:4] == "Pss:")
    return total / (1 << 20)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("way", "limit"), [(None, 1.3), ("forkserver", 2.1)])
def test_four_workers_share_an_array(way: Any, limit: float) -> None:
    """Memory beyond that before, after the last batch, with all workers alive."""
    before = pss_gb()
    dataset = Rows()
    loader = DataLoader(
        dataset,
        8,
        num_workers=WORKERS,
        multiprocessing_context=way,
        persistent_workers=True,
    )
    with loader:
        for _ in range(2):
            assert sum(batch.sum().item() for batch in loader) == ROWS * COLUMNS
        after = pss_gb()
    assert after - before < limit
