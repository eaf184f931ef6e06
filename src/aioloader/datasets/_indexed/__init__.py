"""Random access to the samples of shards: where they are, and reading them."""
