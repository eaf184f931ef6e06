"""The table ``events`` in SQLite and in PostgreSQL, which has ``people`` too."""

import asyncio
import os
import sqlite3
from typing import Any

NEEDS = ("postgresql",)
PEOPLE = """
CREATE EXTENSION IF NOT EXISTS vector;
DROP TABLE IF EXISTS people;
CREATE TABLE people
    (id INT PRIMARY KEY, visits INT[], details JSONB, embedding vector(8));
INSERT INTO people SELECT n, ARRAY(SELECT generate_series(1, n % 3 + 1)),
    jsonb_build_object('stars', n % 5), array_fill(n, ARRAY[8])::vector
FROM generate_series(1, 100) n;
"""
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
        await connection.execute(PEOPLE)
        await connection.copy_records_to_table("events", records=ROWS)
        await connection.close()

    asyncio.run(fill())
