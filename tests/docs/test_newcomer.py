"""The README from top to bottom, as a newcomer follows it, in a new environment."""

import faulthandler
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition("  #")[0]
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
]
[SNIPPET] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no clone")
def test_every_step_of_the_readme_works(tmp_path: Path) -> None:
    """Each command and snippet as written; `make test` only as far as it says."""
    faulthandler.cancel_dump_traceback_later()  # it installs torch
    install, demo, test = COMMANDS
    clone, venv = tmp_path / "aioloader", tmp_path / "venv"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {
        "MAKEFLAGS": f"VENV={venv}",  # one environment for all: half the time
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        # git reads the repository on GitHub from here
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{tmp_path}/.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://github.com/aioloader/",
    }

    def run(command: list[str], folder: Path) -> str:
        ended = subprocess.run(
            command,
            check=False,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert not ended.returncode, f"{command}\n{ended.stdout}"
        return ended.stdout

    run(["git", "clone", "--quiet", str(ROOT), str(clone)], tmp_path)
    run([sys.executable, "-m", "venv", str(venv)], tmp_path)
    run(["python", "-m", "pip", "install", "--upgrade", "pip"], tmp_path)
    run(["sh", "-c", install], tmp_path)
    assert "bottleneck" in run(["python", "-c", SNIPPET], tmp_path)
    assert "accuracy" in run(demo.split(), clone)
    assert "pytest" in run([*test.split(), "--dry-run"], clone)
