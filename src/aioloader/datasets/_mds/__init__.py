"""MosaicML shards: their index, their samples, the encodings of columns."""
