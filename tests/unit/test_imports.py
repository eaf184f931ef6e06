"""Importing the package imports little, and every public name is there."""

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

import aioloader
import aioloader.datasets
from python_process import python

# Modules that only some programs need.
LATER = [
    "PIL", "adbc_driver_manager", "adbc_driver_postgresql", "adbc_driver_sqlite",
    "aiofiles", "aioloader._cli", "aioloader._loader.sources",
    "aioloader._observe.stats", "aioloader._pipeline.inline",
    "aioloader._workers.process.fork_server", "aioloader._workers.process.pool",
    "aioloader.datasets", "aioloader.testing", "asyncpg", "braceexpand", "moto",
    "numpy.random", "obstore", "orjson", "pandas", "pyarrow", "ray", "sqlite3", "tqdm",
    "trio", "uvloop", "zstandard",
]  # fmt: skip
# A loader over a sample list needs none of these either.
NOT_BY_A_LOADER = [name for name in LATER if not name.startswith("aioloader._")]
NOT_BY_A_LOADER = [name for name in NOT_BY_A_LOADER if name != "numpy.random"]


def imported_by(code: str) -> set[str]:
    """Return the modules that ``code`` imports, beyond those of torch."""
    script = (
        "import sys, torch\nbefore = set(sys.modules)\n"
        f"{code}\nprint(*sorted(set(sys.modules) - before))"
    )
    return set(python("-W", "error", "-c", script, check=True).stdout.split())


@pytest.mark.slow
def test_importing_the_package_imports_no_extra() -> None:
    """No dataset, pool, thread, signal handler, loop policy; little generated code."""
    code = (
        "texts = []\nsys.addaudithook(lambda event, details: event == 'compile'"
        " and details[1] == '<string>' and texts.append(details))\n"
        "import threading, signal, asyncio, aioloader\n"
        "assert len(texts) < 75\n"  # of dataclasses, one for each function
        "assert threading.active_count() == 1\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "assert type(asyncio.new_event_loop()).__module__.startswith('asyncio')"
    )
    modules = imported_by(code)
    assert not modules.intersection(LATER)
    assert not [name for name in modules if name.startswith("torch.")]
    assert len([name for name in modules if name.startswith("aioloader")]) < 57


@pytest.mark.slow
def test_iterating_over_a_list_imports_no_extra() -> None:
    modules = imported_by("import aioloader; list(aioloader.DataLoader([1, 2]))")
    assert not modules.intersection(NOT_BY_A_LOADER)


DATASETS = """
import aioloader, asyncio, sys, threading
class Plain:
    def __len__(self): return 8
    def __getitem__(self, index): return index
class Asynchronous(Plain):
    async def __getitem__(self, index): return index
"""


@pytest.mark.slow
def test_making_a_loader_imports_nothing() -> None:
    """The first loader of a process is made as quickly as the next one."""
    code = f"""{DATASETS}
before = set(sys.modules)
aioloader.DataLoader(Plain())
aioloader.DataLoader(Asynchronous())
aioloader.DataLoader(Plain(), 4, num_workers=2)
"""
    assert not imported_by(code)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "unused"),
    [
        ("Plain(), 4", "process inline pipeline stream tuner"),
        ("Plain(), 4, num_workers=2", "fork_server spawn recovery inline tuner anyio"),
        ("Asynchronous(), 4", "process inline threads evened tuner ahead"),
    ],
)
def test_iterating_imports_only_used_modules(arguments: str, unused: str) -> None:
    """Nothing that only other datasets, start methods and arguments need."""
    code = f"{DATASETS}\nlist(aioloader.DataLoader({arguments}))"
    modules = {name.rpartition(".")[2] for name in imported_by(code)}
    assert not modules.intersection(unused.split())


FIRST_STEP = """
class Finder:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is threading.main_thread():
            if name.startswith(("aioloader", "anyio")):
                sys.exit(f"{name} is imported on the caller's loop")
async def main():
    iterator = aiter(loader)
    sys.meta_path.insert(0, Finder())
    await anext(iterator)
    sys.meta_path.pop(0)
    await iterator.aclose()
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", ["Plain()", "Asynchronous()", "Asynchronous(), loop='caller'"]
)
def test_the_first_step_imports_off_the_callers_loop(arguments: str) -> None:
    """The caller's loop serves other tasks meanwhile."""
    imported_by(f"{DATASETS}\nloader = aioloader.DataLoader({arguments})\n{FIRST_STEP}")


@pytest.mark.slow
def test_the_first_iteration_collects_no_garbage() -> None:
    """With torch loaded, a full collection takes as long as the imports."""
    code = f"""{DATASETS}
import gc
phases = []
gc.callbacks.append(lambda phase, info: phases.append(phase))
iterator = iter(aioloader.DataLoader(Plain(), 4, num_workers=2))
gc.disable()
sys.exit(phases.count("stop") > 4 and f"{{phases.count('stop')}} collections")
"""
    imported_by(code)


@pytest.mark.slow
def test_a_dataset_is_imported_when_its_name_is_used() -> None:
    """Its extra is imported when a dataset is constructed."""
    modules = imported_by("import aioloader; aioloader.datasets")
    assert "aioloader.datasets" in modules
    assert not [name for name in modules if name.startswith("aioloader.datasets.")]
    modules = imported_by("from aioloader.datasets import FileDataset, SQLDataset")
    assert "aioloader.datasets.sql" not in modules
    assert (
        not modules.intersection(NOT_BY_A_LOADER)
        - {"aiofiles", "sqlite3"}
        - {"aioloader.datasets", "braceexpand"}
    )


@pytest.mark.parametrize("name", ["aioloader", "aioloader.datasets"])
def test_public_names_are_attributes_in_dir_and_star(name: str) -> None:
    module = importlib.import_module(name)
    for public in module.__all__:
        assert getattr(module, public) is getattr(module, public)
        assert public in dir(module)
    names: dict[str, Any] = {}
    exec(f"from {name} import *", names)
    assert set(module.__all__) <= set(names)


@pytest.mark.parametrize("module", [aioloader, aioloader.datasets])
def test_unknown_names_raise_pythons_own_error(module: Any) -> None:
    with pytest.raises(AttributeError, match=f"'{module.__name__}' has no attribute"):
        _ = module.DataLaoder


@pytest.mark.slow
def test_the_core_imports_no_dataset() -> None:
    """Neither for type checkers nor inside a function."""
    root = Path(aioloader.__file__).parent
    beyond = {"__init__.py", "_cli", "accelerate.py", "datasets", "testing"}
    importers = [
        path.name
        for path in root.rglob("*.py")
        if path.relative_to(root).parts[0] not in beyond
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and "aioloader.datasets" in ast.unparse(node)
    ]
    assert not importers
