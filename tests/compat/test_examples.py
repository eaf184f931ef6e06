"""Examples that need the packages of ``make compat``: they train, stop and resume."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
STARTS = {
    "huggingface_stream": ["resumed after step 40"],
    "lightning_module": [f"training starts at step {step}" for step in (0, 0, 40)],
    "hf_trainer": [
        f"training starts from {place}" for place in ("None", "None", ".*-25")
    ],
}


@pytest.mark.parametrize("name", STARTS)
def test_an_example_resumes_exactly(name: str) -> None:
    """It says where, and that nothing differs from a run without a stop."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    starts = [line for line in lines if re.match("resumed|training starts", line)]
    for start, expected in zip(starts, STARTS[name], strict=True):
        assert re.fullmatch(expected, start)
    assert lines[-1].endswith("after the stop: True")
