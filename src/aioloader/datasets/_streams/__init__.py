"""What streams are made of: shards, cursors over them, lanes, windows and mixtures."""
