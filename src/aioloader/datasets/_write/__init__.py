"""The encoding of samples to write, and destinations in folders and stores."""
