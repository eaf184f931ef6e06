"""SQLite sessions, whose connections read one snapshot of a file in batches.

All read transactions start between the same two commits. In WAL mode, writers
continue; otherwise they wait until the iteration ends. SQLite types values, not
columns. A column gets the type of its first thousand rows; if all are NULL, its
declared type or a later value's. The driver infers types from a batch's first rows.
"""

import asyncio
import re
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from aioloader._base.blocks import Block, FailedSample
from aioloader.datasets._sql.address import column, quoted, select
from aioloader.datasets._sql.postgres import selection
from aioloader.datasets._sql.session import (
    GROWTH,
    Connection,
    Key,
    KeyRange,
    Scan,
    Session,
    close_all,
    encoded,
    fitting,
)
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa


_MAX_CONNECTIONS = 4  # if there are more readers, they share connections
_TRIES = 20
# Milliseconds to wait for a lock: without WAL, commits lock readers out.
_LOCK_WAIT = "PRAGMA busy_timeout = 5000"
_VERSION = "PRAGMA data_version"
_ROW_IDS = frozenset({"rowid", "oid", "_rowid_"})
_VIEW = '"aioloader view"'
_FIRST_ROWS = 1000
# Columns per query, with two result columns each: a result may have 2,000.
_MAX_COLUMNS = 500
# Arrow types of keys, by SQLite type.
_KEY_TYPES = {"integer": "int64", "text": "string", "blob": "binary"}
# Casts by Arrow type: without them, the type of mixed values would depend on order.
_CASTS = {"string": "CAST({} AS TEXT)", "binary": "CAST({} AS BLOB)"}
# Arrow types, by words in a column's declared type.
_DECLARED_TYPES = {
    "int64": re.compile("INT|BOOL"),
    "string": re.compile("CHAR|CLOB|TEXT"),
    "double": re.compile("REAL|FLOA|DOUB|DEC|NUM"),
}
# A column with such a declared type contains no integers.
_REAL = re.compile("REAL|FLOA|DOUB")
_MAX_EXACT = 2**53  # doubles represent all smaller integers exactly
_ENDS = ("min", "max")
# Keys are even if the lowest density at a probe is at least half the highest.
_PROBES, _PROBE_ROWS, _EVEN = 32, 16, 0.5


class SQLite(Session):
    _placeholder = "?"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._connections: dict[Connection, int] = {}  # with their number of scans
        self._types: dict[str, str] = {}  # Arrow types, by column
        self._mixed: list[str] = []  # float columns that may hold integers
        self._row_bytes = 1  # approximate mean
        self._sorts = False  # whether queries sort all rows, as without an index

    async def begin(self, partitions: int | Sequence[Key]) -> list[KeyRange]:
        count = partitions if isinstance(partitions, int) else len(partitions) + 1
        for _ in range(min(count, _MAX_CONNECTIONS)):
            self._connections[connection := Connection(self.address)] = 0
            await connection.run(connection.fetch, _LOCK_WAIT)
        await self._take_snapshot()
        *_, connection = self._connections
        return await connection.run(self._divide, connection, partitions)

    async def join(self) -> Connection:
        """Lend a reader the connection with the fewest running scans."""
        if not self._connections:
            raise RuntimeError("the iteration is over")
        connection = min(self._connections, key=self._connections.__getitem__)
        self._connections[connection] += 1
        return connection

    async def leave(self, connection: Connection, *, is_sound: bool) -> None:  # noqa: ARG002
        """Take back a lent connection; its query may still be running."""
        if connection in self._connections:
            self._connections[connection] -= 1

    async def aclose(self) -> None:
        connections, self._connections = self._connections, {}
        await close_all(connections)

    async def _take_snapshot(self) -> None:
        """Start all transactions at one state of the file, or keep one connection."""
        connections, witness = [*self._connections], Connection(self.address)
        try:
            for _ in range(_TRIES):
                version = await witness.run(witness.fetch, _VERSION)
                await asyncio.gather(*(c.run(_start, c) for c in connections))
                if await witness.run(witness.fetch, _VERSION) == version:
                    return
                for connection in connections:
                    await connection.run(connection.fetch, "ROLLBACK")
        finally:
            await witness.aclose()
        *surplus, shared = connections
        self._connections = {shared: 0}
        await shared.run(_start, shared)
        await close_all(surplus)

    # -- in the connection's thread -----------------------------------------------

    def scan(
        self, connection: Connection, span: KeyRange, last: Key | None, batch_bytes: int
    ) -> Scan:
        """Yield a range's batches; restart the query to change the batch size."""
        # A query that sorts would sort again after each restart.
        count = fitting(self._row_bytes, batch_bytes) if self._sorts else 1
        while True:
            before, is_again = last, last is not None
            rest = span.since(last)
            bounds = [self._key_value(key) for *_, key in rest.bounds()]
            batches = connection.batches(
                self._statement(rest, "?"),
                (*self.relation.parameters, *bounds),
                {"adbc.sqlite.query.batch_rows": str(count)},
            )
            with closing(batches):
                try:
                    for batch in batches:
                        conformed = self._conformed(batch)
                        self._check_digits(connection, conformed)
                        if rows := self._new_rows(conformed, last, is_again=is_again):
                            yield rows
                            last = encoded(rows[0][-1].as_py())
                        is_again = False
                        fits = fitting(batch.nbytes / batch.num_rows, batch_bytes)
                        if count > 2 * fits or fits > GROWTH * count:
                            limit = fits if self._sorts else GROWTH * count
                            count = min(fits, limit)
                            break
                    else:
                        return
                except OSError as exc:
                    # A value has another type; a restart makes the driver infer again.
                    if "Type mismatch" not in str(exc) or last == before:
                        raise

    def _rows(self, batch: "pa.RecordBatch") -> Block:
        """Return a batch's rows; a row with invalid UTF-8 becomes a FailedSample."""
        if _is_valid(batch):
            return super()._rows(batch)
        texts = [n for n in batch.schema.names if not _is_valid(batch.select([n]))]
        rows = list[Any]()
        for number, key in enumerate(batch.column(self.relation.key).to_pylist()):
            row = batch.slice(number, 1)
            bad = [n for n in texts if not _is_valid(row.select([n]))]
            rows += [self._invalid_text(key, bad[0])] if bad else super()._rows(row)
        return rows

    def _invalid_text(self, key: Any, name: str) -> FailedSample:
        label, relation = self.address.label, self.relation
        text = (
            f"the row of {relation.label} of {label!r} with {relation.key} = {key!r} "
            f"has text in column {name!r} that is not UTF-8; write "
            f"CAST({quoted(name)} AS BLOB) in a query"
        )
        return FailedSample(DatasetError(text, location=label))

    def _key_value(self, key: Key) -> int | str | bytes:
        if self._key_type == "blob":
            return bytes.fromhex(str(key).removeprefix("\\x"))
        return key

    def _plan(self, connection: Connection) -> None:
        ((page,),) = connection.fetch("PRAGMA page_size")
        self.address.check_pages(page)
        relation, key = self.relation, self.relation.key
        declared = self._declared(connection)
        is_row_id = not relation.is_query and key.lower() in _ROW_IDS
        self.names = relation.names([*declared], {key} if is_row_id else ())
        if is_row_id:
            declared.setdefault(key, "INTEGER")
        self._find_types(connection, {name: declared[name] for name in self._columns})
        self._check_key(connection)
        self._types[key] = _KEY_TYPES[self._key_type]
        casts = {
            name: ("", _CASTS.get(self._types[name], "")) for name in self._columns
        }
        self._selected = selection({**casts, key: ("", "")}, relation.infinity)
        sql = f"EXPLAIN QUERY PLAN {self._statement(KeyRange(), '')}"
        self._sorts = "FOR ORDER BY" in str(connection.fetch(sql, relation.parameters))

    def _declared(self, connection: Connection) -> dict[str, str]:
        rows = self.relation.select("*")
        if self.relation.parameters:  # a view cannot have parameters
            with connection.cursor() as cursor:
                cursor.execute(f"{rows} LIMIT 0", self.relation.parameters)
                return dict.fromkeys(cursor.fetch_record_batch().schema.names, "")
        connection.fetch(f"CREATE TEMP VIEW {_VIEW} AS {rows}")
        try:
            columns = connection.fetch(f"PRAGMA temp.table_info({_VIEW})")
        finally:
            connection.fetch(f"DROP VIEW temp.{_VIEW}")
        return {str(row[1]): str(row[2] or "").upper() for row in columns}

    def _find_types(self, connection: Connection, declared: dict[str, str]) -> None:
        row: list[Any] = []
        for first in range(0, len(declared), _MAX_COLUMNS):
            row += self._facts(connection, [*declared][first : first + _MAX_COLUMNS])
        self._types = {
            name: _type_of(str(row[2 * n] or ""), declared[name])
            or self._later_type(connection, name, declared[name])
            for n, name in enumerate(declared)
        }
        self._mixed = [
            name
            for name, kind in self._types.items()
            if kind == "double" and not _REAL.search(declared[name])
        ]
        self._row_bytes = int(sum(8 + float(mean or 0) for mean in row[1::2])) + 1

    def _facts(self, connection: Connection, names: Sequence[str]) -> Sequence[Any]:
        """Return each column's types and mean length in turn, from the first rows."""
        # In a subquery, SQLite gets the length of a blob without reading the blob.
        facts = ", ".join(
            f"typeof({column(name)}) AS t{n}, length({column(name)}) AS l{n}"
            for n, name in enumerate(names)
        )
        totals = ", ".join(
            f"group_concat(DISTINCT t{n}), avg(l{n})" for n in range(len(names))
        )
        rows = self.relation.select(facts, f"LIMIT {_FIRST_ROWS}")
        sql = select(totals, f"({rows})")
        row: Sequence[Any] = connection.fetch(sql, self.relation.parameters)[0]
        return row

    def _later_type(self, connection: Connection, name: str, declared: str) -> str:
        """Return the Arrow type of a column's first non-NULL value, or a default."""
        condition = f"WHERE {column(name)} IS NOT NULL LIMIT 1"
        row = self._query_row(connection, f"typeof({column(name)})", condition)
        # Views declare untyped columns as BLOB, so use that only if there is no value.
        default = "binary" if "BLOB" in declared else "double"
        return _type_of(row[0], "") if row else default

    def _check_key(self, connection: Connection) -> None:
        self._refuse_keys(connection, "IS NULL", "NULL")
        # Values sort by type first, so the ends share a type only if all keys do.
        ends = [
            self._query_row(connection, f"typeof({end}({self._key}))") for end in _ENDS
        ]
        kinds = {kind for (kind,) in ends} - {"null"} or {"integer"}
        if len(kinds) > 1 or not kinds <= _KEY_TYPES.keys():
            self._refuse_types(kinds)
        (self._key_type,) = kinds
        if self._key_type == "text":
            # Through the empty SELECT, the UNION uses the key's collation.
            nothing = self.relation.select(f"{self._key} AS k", "WHERE 1 = 0")
            texts = f"{nothing} UNION SELECT 'a' UNION SELECT 'A' UNION SELECT 'a '"
            distinct = select("count(*)", f"({texts})")
            if connection.fetch(distinct, self.relation.parameters) != [(3,)]:
                self._refuse_collation("BINARY")

    def _refuse_types(self, kinds: Iterable[str]) -> None:
        raise ValueError(
            f"key {self.relation.key!r} is {' and '.join(sorted(kinds))}; all must be "
            "integer, all text or all blob"
        )

    def _conformed(self, batch: "pa.RecordBatch") -> "pa.RecordBatch":
        """Return a batch with the planned types; raise if a column does not fit."""
        import pyarrow as pa  # noqa: PLC0415  (an optional dependency)

        names = batch.schema.names
        schema = pa.schema([(n, pa.type_for_alias(self._types[n])) for n in names])
        if batch.schema == schema:
            return batch
        arrays: list[pa.Array] = []
        for array, field in zip(batch.columns, schema, strict=True):
            if array.type == field.type:
                arrays.append(array)
            elif array.null_count == len(array):
                arrays.append(pa.nulls(len(array), field.type))
            elif array.type == pa.int64() and field.type == pa.float64():
                # SQLite converts like this too; `_check_digits` checks the result.
                arrays.append(array.cast(field.type, safe=False))
            else:
                raise ValueError(
                    f"column {field.name!r} is {field.type} in its first rows and "
                    f"{array.type} later; write CAST({quoted(field.name)} AS ...) in a "
                    "query"
                )
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _check_digits(self, connection: Connection, batch: "pa.RecordBatch") -> None:
        """Raise if an integer in a float column has no exact float."""
        from pyarrow import compute  # noqa: PLC0415  (an optional dependency)

        for name in self._mixed:
            ends = compute.min_max(batch.column(name)).values()
            if max(abs(end.as_py() or 0) for end in ends) < _MAX_EXACT:
                continue
            keys, col = batch.column(self.relation.key), column(name)
            bounds = [self._key_value(encoded(keys[end].as_py())) for end in (0, -1)]
            # SQLite compares integers with floats exactly.
            more = f"WHERE {self._key} BETWEEN ? AND ? AND {col} <> CAST({col} AS REAL)"
            if row := self._query_row(connection, col, f"{more} LIMIT 1", *bounds):
                raise ValueError(
                    f"column {name!r} is double and has the integer {row[0]}, which "
                    f"is another number as a double; write CAST({quoted(name)} AS "
                    "INTEGER) or AS TEXT in a query"
                )

    def _cuts(self, connection: Connection, partitions: int) -> list[Key]:
        """Return keys at equal distances or, if keys are uneven, at equal ranks."""
        is_simple = self._key_type == "integer" and not self.relation.is_query
        if is_simple and (even := self._even_cuts(connection, partitions)):
            return even
        (rows,) = self._query_row(connection, "count(*)")
        ranks = sorted({rows * n // partitions for n in range(1, partitions)} - {0})
        cuts: list[Key] = []
        for before, rank in zip([0, *ranks], ranks, strict=False):
            since = self._key_value(cuts[-1]) if cuts else None
            cuts.append(encoded(self._nth(connection, since, rank - before)))
        return [*dict.fromkeys(cuts)]

    def _even_cuts(self, connection: Connection, partitions: int) -> list[Key] | None:
        """Return keys at equal distances; None if the keys are few or uneven."""
        # One query for both min and max would make SQLite read all rows instead of two.
        ends = [self._query_row(connection, f"{end}({self._key})") for end in _ENDS]
        (first,), (last,) = ends
        if first is None or last - first < partitions * _PROBES * _PROBE_ROWS:
            return None
        widths: list[int] = []
        for n in range(_PROBES):
            probe = first + (last - first) * n // _PROBES
            end = self._nth(connection, probe, _PROBE_ROWS - 1)
            widths.append((last if end is None else end) - probe + 1)
        if min(widths) < _EVEN * max(widths):
            return None
        width = last - first + 1
        return [first + width * n // partitions for n in range(1, partitions)]

    def _nth(self, connection: Connection, since: Any, rank: int) -> Any:
        """Return the key ``rank`` rows after the first key >= ``since``, or None."""
        order, values = f"ORDER BY {self._key} LIMIT 1 OFFSET ?", [rank]
        if since is not None:
            order, values = f"WHERE {self._key} >= ? {order}", [since, rank]
        row = self._query_row(connection, self._key, order, *values)
        if row and isinstance(row[0], float):  # SQLite sorts it among the integers
            self._refuse_types(("integer", "real"))
        return row and row[0]


def _is_valid(batch: "pa.RecordBatch") -> bool:
    """Return whether all text is valid UTF-8, which the driver does not check."""
    try:
        batch.validate(full=True)
    except ValueError:
        return False
    return True


def _start(connection: Connection) -> None:
    """Start a transaction, and read a row so that the snapshot is taken now."""
    connection.fetch("BEGIN")
    connection.fetch("SELECT 1 FROM sqlite_master LIMIT 1")


def _type_of(kinds: str, declared: str) -> str:
    """Return the Arrow type for comma-separated SQLite types; "" if unknown."""
    classes = set(kinds.split(",")) - {"null", ""}
    for name, kind in (("blob", "binary"), ("text", "string"), ("real", "double")):
        if name in classes:
            return kind
    hints = (kind for kind, words in _DECLARED_TYPES.items() if words.search(declared))
    hint = next(hints, "")
    if classes:
        return "double" if hint == "double" else "int64"
    return hint
