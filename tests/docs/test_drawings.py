"""The drawings of the pages: readable on any page, and true."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import aioloader
from aioloader import DataLoader, datasets
from aioloader.datasets import TextDataset

DOCS = Path(__file__).parents[2] / "docs"
DRAWINGS = ["choose.svg", "pipeline.svg", "run.svg", "shards.svg", "timeline.svg"]
TAG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_small_and_readable_on_any_page(name: str) -> None:
    """It has a background, so it is readable on light and dark pages."""
    text = (DOCS / name).read_text()
    root = ET.fromstring(text)
    first = next(root.iter(f"{TAG}rect"))
    assert len(text) < 12_000
    assert "@media (prefers-color-scheme: dark)" in text
    assert root.findtext(f"{TAG}title")
    assert first.get("class") == "page"
    assert root.get("viewBox") == f"0 0 {first.get('width')} {first.get('height')}"
    # A page shows it; its alternative text is a sentence.
    pages = "\n".join(path.read_text() for path in DOCS.rglob("*.md"))
    (said,) = re.findall(rf"!\[(.+)\]\((?:\.\./)*{name}\)", pages)
    assert len(said.split()) > 12


def test_names_in_the_drawing_of_choices_exist() -> None:
    """Code in the drawing has classes, functions and arguments."""
    root = ET.parse(DOCS / "choose.svg")
    told = [
        node.text or ""
        for node in root.iter(f"{TAG}text")
        if node.get("class") == "code"
    ]
    names = set(re.findall(r"\b(?:[A-Z]\w+|from_\w+|\w+(?==))", "\n".join(told)))
    loader = DataLoader([1])
    known = {name for name in names if hasattr(datasets, name) or hasattr(loader, name)}
    assert names - known == {"TensorDataset", "RayWorkers"}
    assert hasattr(aioloader, "RayWorkers")
    assert len(known) >= 9


def test_ranks_read_the_samples_that_the_drawing_shows(tmp_path: Path) -> None:
    """Eight shards of four samples, four slots, two ranks, batches of four."""
    for shard in range(8):
        lines = "".join(f"{shard}.{number}\n" for number in range(4))
        (tmp_path / f"{shard}.txt").write_text(lines)
    root = ET.parse(DOCS / "shards.svg")
    groups = [node for node in root.iter(f"{TAG}g") if node.get("class") == "rank"]
    assert len(groups) == 2
    stream = TextDataset(str(tmp_path / "*.txt"), interleave=4)
    for rank, group in enumerate(groups):
        options: dict[str, Any] = {"rank": rank, "world_size": 2, "tail": "uneven"}
        loader = DataLoader(stream, 4, collate_fn=list, **options)
        cells = [text for node in group if re.match(r"\d\.", text := node.text or "")]
        assert [line for batch in loader for line in batch] == cells
