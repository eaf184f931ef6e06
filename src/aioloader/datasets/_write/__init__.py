"""Where shards are written to, and what they are made of."""
