"""Checks that users can run on their own loaders and formats."""

from aioloader.testing._formats import check_shard_format
from aioloader.testing._laws import assert_resumes_exactly, assert_resumes_exactly_async
from aioloader.testing.leaks import Resources, no_leaks

__all__ = [
    "Resources",
    "assert_resumes_exactly",
    "assert_resumes_exactly_async",
    "check_shard_format",
    "no_leaks",
]
