"""The notebook among the examples, in a real kernel."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from scripts.running import KERNEL, end

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
THREADS = """
import threading
print([one.name for one in threading.enumerate() if "aioloader" in one.name])
"""


def code_cells() -> dict[str, dict[str, object]]:
    """Return the notebook's cells of code by their ids."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return {cell["id"]: cell for cell in cells if cell["cell_type"] == "code"}


def test_it_is_committed_without_outputs() -> None:
    """A diff shows changes of the code only."""
    for cell in code_cells().values():
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


@pytest.mark.slow
def test_its_cells_run(tmp_path: Path) -> None:
    """One after the other; two of them again, as the notebook says; nothing is left."""
    sources = []
    for name, cell in code_cells().items():
        source = "".join(cell["source"])  # type: ignore[arg-type]
        sources += [source] * (2 if name in {"train", "break"} else 1)
    script = tmp_path / "cells.py"
    script.write_text("\n# %%\n".join([*sources, THREADS]), encoding="utf-8")
    process = subprocess.Popen(
        [*KERNEL, str(script)],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    ran = end(process, tmp_path)
    assert "Traceback" not in ran.errors, ran.errors
    sample, first, second, *report, left, again, closed, threads = (
        ran.output.splitlines()
    )
    assert sample == "a sample: (64,) 0"
    accuracies = [
        float(re.fullmatch(rf"epoch {number}: accuracy ([\d.]+)", line)[1])  # type: ignore[index]
        for number, line in enumerate((first, second))
    ]
    assert accuracies[0] < accuracies[1]
    assert accuracies[1] > 0.8
    assert ran.errors.count("train: 100%") >= 2
    assert "of the time" in report[0]
    assert report[-1].startswith("Measured over the latest ")
    assert left == "epoch 2: left after a batch of 64"
    assert again == "epoch 3: left after a batch of 64"
    assert closed == (
        "DataLoader(Scans, batch_size=64, num_workers=0, epoch=4, open=0)"
    )
    assert threads == "[]"
    assert (ran.status, ran.left) == (0, [])
