"""Run Python in a new process, for behaviour that only a whole process shows."""

import subprocess
import sys
from typing import Any


def python(
    *arguments: object, check: bool = False, timeout: float = 120, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run Python with these arguments; return its exit status and output.

    The error of a failed process has its output as a note.
    """
    command = [sys.executable, *map(str, arguments)]
    options = {"capture_output": True, "text": True, **options}
    try:
        return subprocess.run(command, check=check, timeout=timeout, **options)
    except subprocess.CalledProcessError as error:
        error.add_note(f"it printed:\n{error.stdout}\nand on stderr:\n{error.stderr}")
        raise
