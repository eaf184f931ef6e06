"""Writing shards: encoding of samples, and destinations in folders and stores."""
