"""Run Python in a new process, for behaviour that only a whole process shows."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any


def python(
    *arguments: object, check: bool = False, timeout: float = 120, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run Python with these arguments; return its exit status and output."""
    command = [sys.executable, *map(str, arguments)]
    options = {"capture_output": True, "text": True, **options}
    done = subprocess.run(command, check=False, timeout=timeout, **options)
    assert not check or done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port that only servers with SO_REUSEADDR can bind, such as torch's."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
