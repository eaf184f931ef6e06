"""CONTRIBUTING.md and SECURITY.md name files that exist; the map is current."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def draw_map() -> ModuleType:
    """The tool, loaded from its file: ``tools`` is no package."""
    spec = importlib.util.spec_from_file_location(
        "draw_map", ROOT / "tools" / "draw_map.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_current(draw_map: ModuleType) -> None:
    """After a change of packages or their docstrings, run the tool again."""
    assert draw_map.MAP.read_text() == draw_map.drawing(), "run tools/draw_map.py"


def test_all_packages_are_drawn(draw_map: ModuleType) -> None:
    """Each package and public module has a row in the import contract."""
    drawn = {name for row in draw_map.layers() for name in row}
    assert drawn == {path.stem for path in _modules(draw_map.SOURCE)}
    assert all(map(draw_map.summary, drawn))


def _modules(source: Path) -> list[Path]:
    packages = [path.parent for path in source.glob("*/__init__.py")]
    modules = [path for path in source.glob("*.py") if path.stem != "__init__"]
    return packages + modules


def test_contributing_shows_it(draw_map: ModuleType) -> None:
    """By its path in the repository."""
    path = draw_map.MAP.relative_to(ROOT).as_posix()
    assert f"]({path})" in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md"])
def test_files_that_are_named_exist(page: str) -> None:
    """In the repository, or in the package."""
    text = (ROOT / page).read_text()
    paths = re.findall(r"`([\w./]+/[\w.]+\.\w+)`", text)
    roots = ROOT, ROOT / "src" / "aioloader"
    lost = [path for path in paths if not any((root / path).exists() for root in roots)]
    assert len(paths) >= 4
    assert not lost
