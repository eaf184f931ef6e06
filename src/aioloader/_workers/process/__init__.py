"""Worker processes: supervisor, ways to start, dispatcher, recovery."""
