"""Filters give the rows of the whole table, whatever statistics were written."""

import datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import compute as pc
from pyarrow import dataset as ds
from pyarrow import parquet as pq

from aioloader.datasets import ParquetDataset, from_arrow
from datasets.shards import read
from datasets.tables import plain, shards

NAN = float("nan")
KINDS = {
    "x": pa.float64(),
    "y": pa.float32(),
    "h": pa.float16(),
    "n": pa.int64(),
    "text": pa.string(),
    "day": pa.date32(),
}
FLOATS = [1.0, 3.0, -0.0, 0.0, NAN, float("inf"), None]
VALUES: dict[str, list[Any]] = {
    "x": FLOATS,
    "y": FLOATS,
    "h": [None if x is None else np.float16(x) for x in FLOATS],
    "n": [1, 3, 2**60, None],
    "text": ["", "a", "b" * 99, "b" * 99 + "c", None],
    "day": [datetime.date(2024, 1, 1), datetime.date(1, 1, 1), None],
}
COMPARISONS = ["__eq__", "__ne__", "__lt__", "__gt__", "__le__", "__ge__"]
ROW = st.fixed_dictionaries({n: st.sampled_from(v) for n, v in VALUES.items()})


def as_column(name: str) -> pc.Expression:
    """Return a column to compare: Arrow does not compare those of float16."""
    return pc.field(name).cast("float32") if name == "h" else pc.field(name)


@st.composite
def conditions(draw: Any) -> pc.Expression:
    """Return a condition on one column."""
    name = draw(st.sampled_from([*KINDS]))
    column, known = as_column(name), [v for v in VALUES[name] if v is not None]
    is_float = pa.types.is_floating(KINDS[name])
    arrow_type = pa.float32() if name == "h" else KINDS[name]
    kind = draw(st.sampled_from([*COMPARISONS, "in", "null", "same", "nan"]))
    if kind == "nan":
        return column.is_nan() if is_float else column.is_valid()
    if kind == "null":
        return column.is_null(nan_is_null=is_float and draw(st.booleans()))
    if kind == "same":
        return column != column  # noqa: PLR0124  (true of NaN)
    if kind == "in":
        values = draw(st.lists(st.sampled_from(VALUES[name]), min_size=1, max_size=3))
        return column.isin(pa.array(values, arrow_type))
    value = draw(st.sampled_from(known))
    return getattr(column, kind)(pa.scalar(value, arrow_type))


EXPRESSIONS = st.recursive(
    conditions(),
    lambda inner: st.one_of(
        inner.map(lambda condition: ~condition),
        st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
    ),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def polars() -> Any:
    """Start polars' runtime before descriptors are counted."""
    module = pytest.importorskip("polars")
    module.DataFrame({"x": [1]}).write_parquet(BytesIO())
    return module


def write_all(polars: Any, table: pa.Table, folder: Path, rows: int) -> list[Path]:
    """Write a table with each writer, in groups of ``rows`` where possible."""
    paths = [folder / f"{i}.parquet" for i in range(4)]
    pq.write_table(table, paths[0], row_group_size=rows)
    pq.write_table(table, paths[1], row_group_size=rows, write_statistics=False)
    frame = polars.from_arrow(table)
    frame.write_parquet(paths[2], row_group_size=rows, statistics="full")
    with pytest.importorskip("duckdb").connect() as connection:
        known = table.set_column(3, "h", table["h"].cast("float32"))
        connection.register("written", known)
        connection.execute(f"COPY written TO '{paths[3]}' (FORMAT parquet)")
    return paths


@pytest.mark.law
@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROW, min_size=1, max_size=8), st.integers(1, 3), EXPRESSIONS)
async def test_rows_never_depend_on_statistics(
    polars: Any, tmp_path: Path, drawn: list[Any], rows: int, filters: pc.Expression
) -> None:
    columns = {n: pa.array([r[n] for r in drawn], k) for n, k in KINDS.items()}
    table = pa.table({"id": range(len(drawn)), **columns})
    wanted = [{"id": n} for n in table.filter(filters)["id"].to_pylist()]
    for path in write_all(polars, table, tmp_path, rows):
        for stream in (
            ParquetDataset(path, ["id"], filters=filters),
            from_arrow(ds.dataset(path), ["id"], filters=filters),
        ):
            assert plain((await read(stream))[0]) == wanted, path


X, N = pc.field("x"), pc.field("n")


@pytest.mark.parametrize(("filters", "ids"), [
    ([("x", "!=", 3.0)], [1, 3]),
    ([("x", "not in", [3.0])], [1, 3]),
    (~(X > 2.0), [1]),
    (X.is_nan(), [1]),
    (X != X, [1]),  # noqa: PLR0124
    (X.is_null(nan_is_null=True) & (N < 3), [1]),
    (pc.field("s", "x") != 3.0, [1, 3]),
], ids=str)  # fmt: skip
async def test_filters_find_nan_despite_statistics(
    filters: Any, ids: list[int], tmp_path: Path
) -> None:
    """The statistics of the first row group say that all values are 3."""
    numbers = [3.0, NAN, 3.0, 4.0]
    nested = [{"x": number} for number in numbers]
    table = pa.table({"x": numbers, "n": range(4), "s": nested, "id": range(4)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    for stream in (
        ParquetDataset(tmp_path / "a.parquet", ["id"], filters=filters),
        from_arrow(ds.dataset(tmp_path), ["id"], filters=filters),
    ):
        assert [row["id"] for row in (await read(stream))[0]] == ids


async def test_groups_are_skipped_where_nan_cannot_match(tmp_path: Path) -> None:
    table = pa.table({"x": [1.0, NAN, 3.0, 4.0, 5.0, 6.0], "n": range(6)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    for filters, groups in (
        (X > 3.5, [1, 2]),
        ((X > 3.5) | (N == 1), [0, 1, 2]),
        ((X > 4.5) | (N == 1), [0, 2]),
        ((X != 3.0) & (N == 1), [0]),
    ):
        stream: Any = ParquetDataset(tmp_path / "a.parquet", filters=filters)
        assert [number for _, number in await shards(stream.made_by)] == groups
