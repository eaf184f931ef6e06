"""The parts of streams: shards, cursors over them, lanes, windows and mixtures."""
