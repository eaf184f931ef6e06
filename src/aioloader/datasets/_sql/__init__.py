"""Modules that read the rows of a database in key ranges of one snapshot."""
