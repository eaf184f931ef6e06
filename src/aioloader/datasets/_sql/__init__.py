"""Reading of database rows: addresses, snapshots, key ranges and readers."""
