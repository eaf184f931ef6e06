"""Check the types as they are on macOS and Windows: no finding that is not known.

Run: ``python tools/platforms.py``. A known one is behind a check at run time (a name
that is looked up where it may be missing). The engine of Linux's workers is left out:
nothing of it runs elsewhere. The counts only go down.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGINE = {
    *("_transport/arena.py", "_transport/channel.py", "_workers/idle.py"),
    *("_workers/process/fork_server.py", "_workers/process/launcher.py"),
    *("_workers/process/pool.py", "_workers/process/recovery.py"),
    *("_workers/process/supervisor.py", "_workers/process/worker_main.py"),
}
KNOWN: dict[str, dict[str, int]] = {
    "darwin": {
        "_base/forks.py": 1,
        "_pipeline/ready.py": 4,
        "_transport/segments.py": 4,
        "_workers/worker_spec.py": 1,
        "datasets/_stores/bytes.py": 1,
    },
    "win32": {
        "_base/forks.py": 5,
        "_pipeline/ready.py": 6,
        "_transport/segments.py": 4,
        "_transport/slots.py": 1,
        "_workers/sharing.py": 3,
        "_workers/worker_spec.py": 1,
        "datasets/_indexed/local.py": 1,
        "datasets/_stores/bytes.py": 2,
        "datasets/_stores/cache_dir.py": 1,
        "datasets/_write/sinks.py": 1,
        "datasets/tokens.py": 4,
    },
}


def findings(platform: str) -> Counter[str]:
    """Return how many errors each file has on a platform, but for the engine."""
    # Each has its own cache: a change of the platform would empty it.
    cache = f"--cache-dir=.mypy_cache/{platform}"
    command = [sys.executable, "-m", "mypy", "--platform", platform, cache, "src"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = re.findall(r"(?m)^src/aioloader/(\S+?):\d+: error: ", ran.stdout)
    assert found or "Success" in ran.stdout, ran.stdout + ran.stderr
    return Counter(path for path in found if path not in ENGINE)


def main() -> None:
    """Print files with more findings than are known, and fail if there are any."""
    new = 0
    for platform, known in KNOWN.items():
        for path, count in sorted(findings(platform).items()):
            if count > known.get(path, 0):
                print(f"{platform}: {path}: {count}, known: {known.get(path, 0)}")
                new += 1
    sys.exit(bool(new))


if __name__ == "__main__":
    main()
