"""The parts of streams: shards, cursors, steps, readers, and the ranks' agreement."""
