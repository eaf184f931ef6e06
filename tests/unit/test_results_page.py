"""The page of benchmark results says what the JSON files say, losses included."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ENVIRONMENT = {
    "date": "2026-01-02T03:04:05+00:00",
    "command": "python benchmarks/tiny.py --rounds 3",
    "python": "3.11.7",
    "platform": "Linux",
    "cpu": "a processor",
    "gpu": None,
    "cores": 2,
    "commit": "0123456789abcdef",
    "packages": {"torch": "2.13.0", "spdl": None},
}


def page(modules: dict[str, ModuleType], folder: Path, **kept: Any) -> str:
    """Return the page of a folder, in which the results of a question are kept."""
    if kept:
        text = {"question": "tiny", "text": "Is tiny fast?", "seconds": 1.0}
        whole = text | {"environment": ENVIRONMENT, "targets": []} | kept
        (folder / "tiny.json").write_text(json.dumps(whole))
    results = modules["figures"].read_all(folder)
    return str(modules["results_page"].page(results, folder / "plots"))


def test_the_page_is_up_to_date(modules: dict[str, ModuleType]) -> None:
    results = modules["figures"].read_all(BENCHMARKS / "results")
    text = modules["results_page"].page(results, BENCHMARKS / "plots")
    assert (BENCHMARKS / "RESULTS.md").read_text() == text
