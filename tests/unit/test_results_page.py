"""The page of benchmark results says what the JSON files say, losses included."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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


@pytest.fixture(name="modules")
def _modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The scripts, imported as they import each other."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("figures", "readme", "results_page")
    found = {name: importlib.import_module(name) for name in names}
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    return found


def metric(key: str, *, higher: bool) -> dict[str, Any]:
    return {"key": key, "title": f"{key} title", "spec": ",.1f", "higher": higher}


def page(modules: dict[str, ModuleType], folder: Path, **kept: Any) -> str:
    """Return the page of a folder, in which the results of a question are kept."""
    if kept:
        text = {"question": "tiny", "text": "Is tiny fast?", "seconds": 1.0}
        whole = text | {"environment": ENVIRONMENT, "targets": []} | kept
        (folder / "tiny.json").write_text(json.dumps(whole))
    results = modules["figures"].read_all(folder)
    return str(modules["results_page"].page(results, folder / "plots"))


def test_a_loss_is_shown_as_plainly_as_a_win(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    rounds = {
        "small: torch": [{"rate": 10.0}, {"rate": 20.0}, {"rate": 30.0}],
        "small: aioloader": [{"rate": 20.0}, {"rate": 40.0}, {"rate": 60.0}],
        "large: torch": [{"rate": 10.0}],
        "large: aioloader": [{"rate": 5.0}],
    }
    text = page(modules, tmp_path, metrics=[metric("rate", higher=True)], rounds=rounds)
    assert "as good or better in 1 of 2 cases, worse in 1" in text
    assert "| torch | 20.0 ±25% | 2.00 |" in text
    assert "| torch | 10.0 | **0.50** |" in text
    assert "`python benchmarks/tiny.py --rounds 3`; commit `012345678`" in text


def test_what_a_peer_does_not_do_at_all_is_no_loss(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    """Its figure is 0; the count is that of the ratios in bold."""
    rounds = {
        "a: torch": [{"rate": 0.0}],
        "a: aioloader": [{"rate": 5.0}],
        "b: torch": [{"rate": 2.0}],
        "b: aioloader": [{"rate": 1.0}],
    }
    text = page(modules, tmp_path, metrics=[metric("rate", higher=True)], rounds=rounds)
    assert "as good or better in 1 of 2 cases, worse in 1 (in bold)" in text
    assert "| torch: 0.0 | ∞ |" in text


def test_less_is_better_where_the_metric_says_so(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    rounds = {"torch": [{"us": 10.0}], "aioloader": [{"us": 4.0}]}
    missed = [{"text": "tiny has 4 in us, promised 3", "met": False}]
    metrics = [metric("us", higher=False)]
    text = page(modules, tmp_path, metrics=metrics, rounds=rounds, targets=missed)
    assert "| torch | 10.0 | 2.50 |" in text
    assert "**missed**: tiny has 4 in us, promised 3" in text


def test_curves_meet_where_their_ratio_passes_one(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    rounds = {
        "torch": [{"1": 10.0, "100": 10.0}],
        "aioloader": [{"1": 1.0, "100": 100.0}],
    }
    metrics = [metric(key, higher=True) for key in ("1", "100")]
    text = page(modules, tmp_path, metrics=metrics, rounds=rounds, axis="bytes")
    assert (
        "| torch | 0.10 to 10.00 | equal at 10 bytes; **slower** below the first |"
        in (text)
    )


def test_shares_of_runs(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    """Of yes and no, not their median; and a figure that a run lacks is left out."""
    runs = [{"right": True, "gain": 2.0}, {"right": True, "gain": None}]
    runs += [{"right": True, "gain": 2.0}, {"right": False, "gain": 2.0}]
    kept = {"environment": ENVIRONMENT, "seconds": 1.0, "plants": {"hogged": runs}}
    (tmp_path / "plants.json").write_text(json.dumps(kept))
    text = page(modules, tmp_path)
    assert "| hogged | 0.75 ±" in text
    assert " | 2 ±0% |" in text


def test_the_page_is_up_to_date(modules: dict[str, ModuleType]) -> None:
    results = modules["figures"].read_all(BENCHMARKS / "results")
    text = modules["results_page"].page(results, BENCHMARKS / "plots")
    assert (BENCHMARKS / "RESULTS.md").read_text() == text
