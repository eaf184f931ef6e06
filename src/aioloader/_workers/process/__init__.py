"""Worker processes: how they start, their supervisor, dispatcher and recovery."""
