"""Run the cells of a file in a real IPython kernel, and print what they print."""

import re
import sys
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager


def show(message: dict[str, Any]) -> None:
    """Print what a cell printed."""
    content = message["content"]
    if message["msg_type"] == "stream":
        print(content["text"], end="", file=getattr(sys, content["name"]))
    elif message["msg_type"] == "error":
        print("\n".join(content["traceback"]), file=sys.stderr)


def main() -> None:
    """Send one cell after the other; stop at the first that fails."""
    manager = KernelManager(kernel_name="python3")
    if manager.kernel_spec is None:
        raise RuntimeError("no kernel is installed")
    manager.kernel_spec.argv[0] = sys.executable
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    for cell in re.split(r"^# %%\n", text, flags=re.MULTILINE):
        reply = client.execute_interactive(cell, timeout=60, output_hook=show)
        if reply["content"]["status"] != "ok":
            break
    client.stop_channels()
    manager.shutdown_kernel()


if __name__ == "__main__":
    main()
