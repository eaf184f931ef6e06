"""The table ``events`` in SQLite and in PostgreSQL."""

import asyncio
import os
import sqlite3
from typing import Any

NEEDS = ("postgresql",)
ROWS = [(n, n % 31, n / 2) for n in range(1000)]


def before(page: dict[str, Any]) -> None:
    """Fill both."""
    import asyncpg  # noqa: PLC0415

    database = sqlite3.connect("events.db")
    database.execute(
        "CREATE TABLE events (id INTEGER PRIMARY KEY, day INT, value REAL)"
    )
    database.executemany("INSERT INTO events VALUES (?, ?, ?)", ROWS)
    database.commit()
    database.close()

    async def fill() -> None:
        connection = await asyncpg.connect(os.environ["DATABASE_URL"])
        await connection.execute("DROP TABLE IF EXISTS events")
        await connection.execute(
            "CREATE TABLE events (id INT PRIMARY KEY, day INT, value FLOAT8)"
        )
        await connection.copy_records_to_table("events", records=ROWS)
        await connection.close()

    asyncio.run(fill())
