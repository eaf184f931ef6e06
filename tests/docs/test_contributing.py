"""CONTRIBUTING.md and SECURITY.md name existing files; generated pages are current."""

import importlib
import re

import pytest

from docs.snippets import ROOT, loaded

MODULES = ["aioloader", "aioloader.datasets", "aioloader.testing"]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))


def test_the_map_of_packages_is_current() -> None:
    """After a change of packages or docstrings, run the tool again."""
    draw_map = loaded(ROOT / "tools" / "draw_map.py")
    assert draw_map.MAP.read_text() == draw_map.drawing(), "run tools/draw_map.py"
    path = draw_map.MAP.relative_to(ROOT).as_posix()
    assert f"]({path})" in (ROOT / "CONTRIBUTING.md").read_text()
    # Each package and public module has a row in the import contract.
    drawn = {name for row in draw_map.layers() for name in row}
    packages = {path.parent.stem for path in draw_map.SOURCE.glob("*/__init__.py")}
    modules = {path.stem for path in draw_map.SOURCE.glob("*.py")} - {"__init__"}
    assert drawn == packages | modules
    assert all(map(draw_map.summary, drawn))


@pytest.mark.slow
def test_the_reference_pages_are_current() -> None:
    """After a change of docstrings or signatures, run the tool again."""
    reference = loaded(ROOT / "tools" / "reference.py").Reference()
    texts = {page: page.read_text() for page in PAGES}
    old = [page.name for page in PAGES if reference.updated(texts[page]) != texts[page]]
    assert not old, "run tools/reference.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_public_names_are_in_the_reference(name: str) -> None:
    """With an anchor, or in a sentence."""
    text = "".join(page.read_text() for page in PAGES)
    lost = [
        public
        for public in importlib.import_module(name).__all__
        if f'id="{name}.{public}"' not in text and f"`{name}.{public}`" not in text
    ]
    assert not {*lost} - {"datasets", "errors"}  # modules


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md"])
def test_named_files_exist(page: str) -> None:
    """In the repository, or in the package."""
    text = (ROOT / page).read_text()
    paths = re.findall(r"`([\w./]+/[\w.]+\.\w+)`", text)
    roots = ROOT, ROOT / "src" / "aioloader"
    lost = [path for path in paths if not any((root / path).exists() for root in roots)]
    assert len(paths) >= 4
    assert not lost
