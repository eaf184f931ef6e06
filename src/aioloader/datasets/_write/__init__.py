"""Writing shards: their contents, and where they are stored."""
