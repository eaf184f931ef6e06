"""Rows of databases: addresses, snapshots, key ranges and the reading of them."""
