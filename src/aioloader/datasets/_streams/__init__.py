"""The parts of streams: shards, cursors, steps, readers, and agreement of ranks."""
