"""The committed reference is that of the docstrings, and has all public names."""

import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))


@pytest.mark.slow
def test_the_reference_is_current() -> None:
    """After a change of docstrings or signatures, run the tool again."""
    path = ROOT / "tools" / "reference.py"
    spec = importlib.util.spec_from_file_location("reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    reference = module.Reference()
    texts = {page: page.read_text() for page in PAGES}
    old = [page.name for page in PAGES if reference.updated(texts[page]) != texts[page]]
    assert not old, "run tools/reference.py"


MODULES = ["aioloader", "aioloader.datasets", "aioloader.testing"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_public_names_are_in_it(name: str) -> None:
    """With an anchor, or in a sentence."""
    text = "".join(page.read_text() for page in PAGES)
    public = importlib.import_module(name).__all__
    lost = [
        one
        for one in public
        if f'id="{name}.{one}"' not in text and f"`{name}.{one}`" not in text
    ]
    assert not {*lost} - {"datasets", "errors"}  # modules
