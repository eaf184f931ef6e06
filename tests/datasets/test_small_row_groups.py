"""Small row groups, which are decoded together: as if each were read alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from aioloader._order.blocks import Bad, Block
from aioloader.datasets import ParquetDataset
from aioloader.datasets._arrow import reader
from aioloader.errors import DatasetError
from datasets.tables import contents, put
from datasets.tables import write_parquet as write

GROUPS, ROWS = 40, 50


@pytest.fixture
def small(tmp_path: Path) -> str:
    table = pa.table({"n": range(GROUPS * ROWS), "m": np.random.rand(GROUPS * ROWS)})
    return write(tmp_path / "small.parquet", table, row_group_size=ROWS)


@pytest.fixture
def hops(monkeypatch: pytest.MonkeyPatch) -> list[list[list[Block]]]:
    """Return what was decoded by each hop to a thread."""
    found: list[list[list[Block]]] = []
    step_all = reader._step_all

    def noted(shards: Sequence[Any], nbytes: int) -> Any:
        steps = step_all(shards, nbytes)
        found.append([[block for _, block in made] for made in steps.values()])
        return steps

    monkeypatch.setattr(reader, "_step_all", noted)
    return found


async def numbers(made: ParquetDataset, state: Any = None, limit: int = 64) -> Any:
    found: list[Any] = []
    states: list[tuple[int, Any]] = []
    if state is not None:
        made.load_state_dict(state)
    async with aiter(made) as rows:
        while len(block := await rows.pull(limit)):
            found += [row if isinstance(row, Bad) else int(row["n"]) for row in block]
            states.append((len(found), rows.state_dict()))
    return found, states


async def test_few_hops(small: str, hops: list[Any]) -> None:
    found, _ = await numbers(ParquetDataset(small))
    assert found == [*range(GROUPS * ROWS)]
    assert len(hops) < GROUPS / 4
    assert sum(len(shards) for shards in hops) == GROUPS


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"interleave": 3}])
async def test_resumes_anywhere(small: str, options: dict[str, Any]) -> None:
    whole, states = await numbers(ParquetDataset(small, **options), limit=37)
    assert sorted(whole) == [*range(GROUPS * ROWS)]
    for count, state in states[::7]:
        rest, _ = await numbers(ParquetDataset(small, **options), state)
        assert rest == whole[count:]


async def test_only_the_damaged_one_is_lost(small: str) -> None:
    chunk = pq.read_metadata(small).row_group(7).column(1)
    data = bytearray(contents(small))
    data[chunk.dictionary_page_offset + chunk.total_compressed_size - 8] ^= 255
    put(small, data)
    found, _ = await numbers(ParquetDataset(small))
    (at,) = [at for at, row in enumerate(found) if isinstance(row, Bad)]
    assert at == 7 * ROWS
    assert isinstance(found[at].error, DatasetError)
    assert "row group 7" in str(found[at].error)
    del found[at]
    lost = range(7 * ROWS, 8 * ROWS)
    assert found == [n for n in range(GROUPS * ROWS) if n not in lost]


async def test_bytes_are_counted_as_decoded(tmp_path: Path, hops: list[Any]) -> None:
    """What is small as it is written, but not decoded, is not held all at once."""
    table = pa.table({"n": np.zeros(40 * 20_000, np.int64)})
    path = write(tmp_path / "zeros.parquet", table, row_group_size=20_000)
    async with aiter(ParquetDataset(path, max_bytes=1 << 20)) as rows:
        while len(await rows.pull(1 << 14)):
            pass
    decoded = [sum(len(b) for blocks in shards for b in blocks) * 8 for shards in hops]
    assert sum(decoded) == table.nbytes
    assert max(decoded) <= (1 << 18) + 16_384 * 8  # its share, and a batch
