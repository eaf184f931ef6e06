"""Checks that users can run on their own datasets and loaders."""

from aioloader.testing.leaks import Resources, no_leaks

__all__ = ["Resources", "no_leaks"]
