"""The page of benchmark results says what the JSON files say, losses included."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_results_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("figures", "readme", "results_page")  # they import each other
    figures, _, results_page = (importlib.import_module(name) for name in names)
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    results = figures.read_all(BENCHMARKS / "results")
    text = results_page.page(results, BENCHMARKS / "plots")
    assert (BENCHMARKS / "RESULTS.md").read_text() == text
