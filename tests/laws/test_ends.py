"""The law of ends: a shard that was cut is an error, or nothing of it is missing."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioloader import DataLoader
from aioloader.errors import DatasetError
from datasets.shards import NAMES, Make, arrow, parquet, tar, tar_zstd, text_gzip
from laws.chains import upper
from laws.test_resume import collated

pytestmark = pytest.mark.law
# Formats that show where a shard ends; lines do not, and rely on the listed length.
MAKES: list[Make] = [text_gzip, tar, tar_zstd, parquet, arrow]


@given(
    st.sampled_from(MAKES),
    st.integers(0, 7),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 4),
)
def test_any_cut(make: Make, shard: int, where: float, interleave: int) -> None:
    """Whole samples come before the error; a tar's padding may be missing."""
    names = [upper(name) for name in NAMES]
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        stream = make(Path(folder), interleave=interleave)
        path = sorted(Path(folder).iterdir())[shard]
        os.truncate(path, int(where * path.stat().st_size))
        loader = DataLoader[Any](stream, 3, collate_fn=collated)
        try:
            for batch in loader:
                found += batch
        except DatasetError:
            assert {*found} < {*names}
            return
    assert sorted(found) == sorted(names)
