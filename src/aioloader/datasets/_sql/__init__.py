"""Rows of databases: addresses, snapshots, key ranges and readers."""
