"""Bytes to values and back, by extension."""
