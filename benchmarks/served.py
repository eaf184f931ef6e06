"""The object server of the tests, for benchmarks."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from object_server import ObjectServer

__all__ = ["ObjectServer"]
