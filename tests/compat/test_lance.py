"""A Lance dataset is read like one of pyarrow, from which it is derived."""

import itertools
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from aioloader import DataLoader
from aioloader.datasets import from_arrow

ROWS = 5000


@pytest.fixture
def dataset(tmp_path: Path) -> Any:
    """Five files, without the rows of one that were deleted, and half of another's."""
    vectors = pa.array([[n] * 4 for n in range(ROWS)], pa.list_(pa.float32(), 4))
    table = pa.table({"n": range(ROWS), "v": vectors})
    made = lance.write_dataset(table, tmp_path / "it.lance", max_rows_per_file=1000)
    made.delete("n < 1500")
    return lance.dataset(tmp_path / "it.lance")


def numbers(loader: Any) -> list[int]:
    with loader:
        return [n for batch in loader for n in batch["n"].tolist()]


@pytest.mark.parametrize("filters", [None, ds.field("n") >= 4000, [("n", ">=", 4000)]])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_ranks_read_each_row_once(ranks: int, filters: Any, dataset: Any) -> None:
    """With more ranks than files, files are split."""
    stream = from_arrow(dataset, ["n"], filters=filters, shuffle=True)
    options: Any = {"world_size": ranks, "tail": "uneven"}
    shares = [numbers(DataLoader(stream, 64, rank=r, **options)) for r in range(ranks)]
    first = 1500 if filters is None else 4000
    assert sorted(itertools.chain(*shares)) == [*range(first, ROWS)]


def test_a_lance_dataset_resumes(dataset: Any) -> None:
    """After 30 batches; a column may hold lists."""

    def made() -> Any:
        return DataLoader(from_arrow(dataset, shuffle=True), 64)

    loader = made()
    iterator = iter(loader)
    for _ in range(30):
        assert next(iterator)["v"].shape == (64, 4)
    state = loader.state_dict()
    rest = [n for batch in iterator for n in batch["n"].tolist()]
    resumed = made()
    resumed.load_state_dict(state)
    assert numbers(resumed) == rest
