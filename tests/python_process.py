"""Python in a process of its own, for what only a whole process shows."""

import subprocess
import sys
from typing import Any


def python(
    *arguments: object, check: bool = False, timeout: float = 120, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run Python with these arguments; return how it ended, and what it said."""
    command = [sys.executable, *map(str, arguments)]
    options = {"capture_output": True, "text": True, **options}
    return subprocess.run(command, check=check, timeout=timeout, **options)
