"""Tables in Arrow memory: Parquet and IPC files, and blocks of their rows."""
