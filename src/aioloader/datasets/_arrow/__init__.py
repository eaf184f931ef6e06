"""Tables in Arrow's memory: Parquet and IPC files, and blocks of their rows."""
