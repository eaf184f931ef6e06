"""The public names and signatures, and bounds on the size of the source."""

import doctest
import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest
import torch.utils.data

import aioloader
from aioloader.errors import UNRELEASED

ROOT = Path(__file__).parents[2]


def test_public_names_are_exactly_these() -> None:
    """Changing this list is changing the product."""
    names = """
        SKIP DataLoader Device Failure LoaderStats PrometheusCollector RayWorkers Retry
        ShuffledIndices Skip TokenBudgetBatchSampler WorkerInfo datasets default_collate
        default_convert errors get_worker_info merge_states merge_traces
        observe_with_opentelemetry pad_collate progress varlen_collate warm_up
    """
    assert aioloader.__all__ == names.split()
    assert all(hasattr(aioloader, name) for name in aioloader.__all__)


def test_the_version_is_where_hatch_reads_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    path = project["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{aioloader.__version__}"' in (ROOT / path).read_text()


def test_install_hints_can_be_pasted_into_a_shell() -> None:
    """Brackets are quoted, extras exist.

    No index has the package yet: hints name the repository, as the README does.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = {*project["project"]["optional-dependencies"], "extra"}
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    hints = re.findall("pip install (.*)", source)
    quoted = [re.match(r'"aioloader\[(.*)\]\{UNRELEASED\}"', hint) for hint in hints]
    assert all(quoted), hints
    named = {hint[1].strip("{}") for hint in quoted if hint}
    asked = re.findall(r'imported\(\s*f?"[\w.{}]+",\s*"([\w-]+)",', source)
    assert named | {*asked} <= extras
    assert len(asked) > 8
    readme = (ROOT / "README.md").read_text()
    assert f'pip install "aioloader[objects,pictures]{UNRELEASED}"' in readme
    assert UNRELEASED.endswith(f"git+{project['project']['urls']['Source']}")


def test_the_constructor_begins_with_torchs_arguments() -> None:
    """Torch's seventeen arguments: names, order, kinds, defaults; ours keyword-only."""
    theirs = inspect.signature(torch.utils.data.DataLoader.__init__).parameters
    ours = inspect.signature(aioloader.DataLoader.__init__).parameters
    for name, parameter in theirs.items():
        assert ours[name].kind is parameter.kind, name
        assert ours[name].default == parameter.default, name
    assert list(ours)[: len(theirs)] == list(theirs)
    added = list(ours.values())[len(theirs) :]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in added)
    assert len(ours) - 1 == 33
    names = """
        snapshot_every_n_steps transform concurrency device workers fetch rng on_timeout
        loop on_error retry rank world_size tail lifespan prefetch_bytes
    """
    assert [parameter.name for parameter in added] == names.split()


def test_no_file_is_longer_than_700_lines() -> None:
    lines = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for folder in ("src", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert len(lines) > 500
    assert {path: n for path, n in lines.items() if n > 700} == {}


# Lines and classes, which only go down.
BOUNDS = {
    "src": 50_316,
    "src/aioloader/datasets": 22_257,
    "src/aioloader/testing": 650,
    "tests": 52_927,
}
CLASSES = 419


def test_line_and_class_counts_only_go_down() -> None:
    """A line that is added takes the place of another."""
    lines, classes = dict.fromkeys(BOUNDS, 0), 0
    for folder in BOUNDS:
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            lines[folder] += len(text.splitlines())
            classes += folder == "src" and len(re.findall(r"(?m)^ *class ", text))
    assert {folder: n for folder, n in lines.items() if n > BOUNDS[folder]} == {}
    assert classes <= CLASSES


def test_no_class_is_replaced_by_an_alias_of_any() -> None:
    """Such an alias would hide an import cycle."""
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    assert not any(re.search(r": TypeAlias = Any\b", text) for text in sources)


def test_only_one_module_runs_code_in_threads_from_a_loop() -> None:
    """A coroutine that runs plain code in a thread awaits ``in_thread``."""
    leaves = re.compile(r"asyncio\.to_thread[(,]|import run_sync|\.run_in_executor\b")
    paths = [*(ROOT / "src").rglob("*.py")]
    leaving = [path.name for path in paths if leaves.search(path.read_text())]
    assert leaving == ["cancellation.py"]


# accelerate is installed in `make compat` only
EXAMPLES = [
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
    for path in sorted((ROOT / "src").rglob("*.py"))
    if ">>> " in path.read_text() and path.stem != "accelerate"
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstring_examples_run(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted
    assert not results.failed
