"""Rows of an SQLite database through a connection that the dataset holds."""

import sqlite3

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset

connection = sqlite3.connect("rows.db")
connection.row_factory = sqlite3.Row
connection.create_function("half", 1, lambda x: x / 2)
with connection:
    connection.execute(
        "CREATE TABLE points (id INTEGER PRIMARY KEY, x REAL, name TEXT)"
    )
    rows = [(i, i * 0.5, f"p{i}") for i in range(30)]
    connection.executemany("INSERT INTO points VALUES (?, ?, ?)", rows)


class Points(Dataset):
    def __init__(self, connection):
        self.connection = connection

    def __len__(self):
        return self.connection.execute("SELECT count(*) FROM points").fetchone()[0]

    def __getitem__(self, index):
        query = "SELECT id, half(x) AS y, name FROM points WHERE id = ?"
        return dict(self.connection.execute(query, (index,)).fetchone())


torch.manual_seed(2)
loader = DataLoader(Points(connection), batch_size=7, shuffle=True, num_workers=2)
for epoch in range(2):
    for batch in loader:
        print(batch["id"].tolist(), batch["y"].tolist(), batch["name"])
print(connection.execute("SELECT sum(x) FROM points").fetchone()[0])
connection.close()
