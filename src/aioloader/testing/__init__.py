"""Checks that users can run on their own datasets and loaders."""

from aioloader.testing.leaks import Resources, no_leaks
from aioloader.testing.objects import Counts, Faults, ObjectServer

__all__ = ["Counts", "Faults", "ObjectServer", "Resources", "no_leaks"]
