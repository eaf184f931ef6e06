"""Damaged Parquet: an error that says where, or the right rows; never a crash."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from aioloader.datasets._arrow.parquet import ParquetFormat
from aioloader.errors import DatasetError
from datasets.tables import (
    Local,
    contents,
    flip,
    outcome,
    put,
    read_shard,
)
from datasets.tables import write_parquet as write

PLACES = pytest.mark.parametrize("is_remote", [False, True], ids=["file", "object"])


@pytest.fixture
def numbered(tmp_path: Path) -> str:
    """Return a file of 50 rows, a number and a text."""
    table = pa.table({"n": range(50), "text": [f"{n}" for n in range(50)]})
    return write(tmp_path / "numbered.parquet", table)


@PLACES
async def test_damage_names_its_place(is_remote: bool, numbered: str) -> None:
    """The row groups before it are read; the error names file, row group and row."""
    chunk = pq.read_metadata(numbered).row_group(1).column(0)
    flip(numbered, chunk.dictionary_page_offset + chunk.total_compressed_size - 1)
    made = ParquetFormat(numbered, Local(is_remote=is_remote))
    assert len(await read_shard(made, (numbered, 0))) == 20
    text = r"row group 1 of 'numbered\.parquet' cannot be read, from row 0 on: .*CRC"
    with pytest.raises(DatasetError, match=text):
        await read_shard(made, (numbered, 1))
    assert len(await read_shard(made, (numbered, 2))) == 10


async def test_a_file_that_was_written_anew_is_an_error(numbered: str) -> None:
    """As far as it shows: fewer rows, or fewer row groups."""
    made = ParquetFormat(numbered, Local())
    with pytest.raises(DatasetError, match="has 20 rows and is to be read from row 30"):
        await read_shard(made, (numbered, 0), row=30)
    with pytest.raises(DatasetError, match="has 3 row groups, number 3 is wanted"):
        await read_shard(made, (numbered, 3))


async def test_a_damaged_footer_does_not_end_the_process(tmp_path: Path) -> None:
    """pyarrow lets exceptions of C++ pass where it is asked for columns one by one."""
    path = write(tmp_path / "a.parquet", pa.table({"n": [[1], [2, 3]]}))
    whole = contents(path)
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    errors = []
    for at in range(footer + 14, footer + 40):  # where the schema says what is nested
        for bit in range(8):
            put(path, whole)
            flip(path, at, bit)
            found = await outcome(path, Local())
            errors += [str(found)] if isinstance(found, DatasetError) else []
    assert any("row group 0 of 'a.parquet' has a footer that" in one for one in errors)


async def test_row_groups_beside_a_damaged_one_are_read(tmp_path: Path) -> None:
    """If the footer has gone wrong where it speaks of one of them alone."""
    path = write(tmp_path / "a.parquet", pa.table({"n": range(50)}))
    whole = contents(path)
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    lengths: list[Any] = []
    for at in range(footer + 164, footer + 172):  # where the second one's column is
        put(path, whole)
        flip(path, at, 5)
        made = ParquetFormat(path, Local())
        found = [await length_of(made, (path, number)) for number in range(3)]
        lengths += [found] if "has a footer that" in str(found[1]) else []
    assert [20, 10] in [[first, last] for first, _, last in lengths]


async def length_of(made: ParquetFormat, shard: Any) -> int | str:
    """Return the number of rows of a shard, or why it cannot be read."""
    try:
        return len(await read_shard(made, shard))
    except DatasetError as error:
        return str(error)


async def test_a_file_about_other_files_is_an_error(
    numbered: str, tmp_path: Path
) -> None:
    """Such as ``_metadata``, which has no columns of its own."""
    metadata = pq.read_metadata(numbered)
    metadata.set_file_path("numbered.parquet")
    path = tmp_path / "_metadata.parquet"
    metadata.write_metadata_file(path)
    found = await outcome(path, Local())
    assert isinstance(found, DatasetError)
    assert "has columns in other files: 'numbered.parquet'" in str(found)
