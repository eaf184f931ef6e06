"""The building blocks of streams, from shards and cursors to the ranks' agreement."""
