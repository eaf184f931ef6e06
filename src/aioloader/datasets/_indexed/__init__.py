"""Random access to the samples of shards, local and remote."""
