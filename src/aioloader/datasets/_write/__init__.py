"""Writing shards: how samples are encoded, and destinations in folders and stores."""
