"""The two maps in CONTRIBUTING.md, of an iteration and of a state, are true."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from docs.snippets import ROOT
from python_process import python

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
ITERATION = TEXT.partition("## One iteration")[2].partition("\n## ")[0]
STATE = TEXT.partition("## The anatomy of a state")[2].partition("\n## ")[0]


def printed() -> Any:
    """Return the state as printed; what is left out is "..."."""
    text = re.findall(r"```text\n(.+?)```", STATE, re.DOTALL)[0]
    text = text.replace("{...}", '"..."').replace("[...]", '"..."')
    return json.loads(re.sub(r"(?<!\")\.\.\.(?!\")", '"..."', text))


def assert_alike(shown: Any, saved: Any, path: str = "") -> None:
    """Compare what is shown with a state; positions in shards by their keys only."""
    if shown == "...":
        return
    if isinstance(shown, dict):
        assert shown.keys() == saved.keys(), path
        for key, value in shown.items():
            assert_alike(value, saved[key], f"{path}/{key}")
    elif isinstance(shown, list):
        assert len(shown) == len(saved), path
        for value, other in zip(shown, saved, strict=True):
            assert_alike(value, other, path)
    elif "lanes" not in path:
        assert shown == saved, path


def keys_of(shown: Any) -> set[str]:
    """Return the keys at all levels; a description has those of its stream."""
    if isinstance(shown, list):
        return set().union(*map(keys_of, shown))
    if not isinstance(shown, dict):
        return set()
    below = [keys_of(value) for key, value in shown.items() if key != "stream"]
    return {key for key in shown if not key.isdecimal()}.union(*below)


@pytest.mark.slow
def test_a_saved_state_looks_as_printed(tmp_path: Path) -> None:
    """Three batches of two readers; each slot's numbers add up to its samples."""
    (code,) = re.findall(r"```python\n(.+?)```", STATE, re.DOTALL)
    script = tmp_path / "saved.py"
    script.write_text(code)
    saved = json.loads(python(script, cwd=tmp_path, check=True).stdout)
    assert_alike(printed(), saved)
    lines = (tmp_path / "0.txt").read_bytes()
    for reader, count in ("0", 1000), ("1", 500):
        stream = saved["states"][0][reader]["dataset"]["streams"][reader]
        for slot in stream["state"]["up"]["lanes"]:
            before = lines[: slot["at"]["byte"]].count(b"\n")
            assert before + slot["at"]["sample"] + slot["taken"] == count


def test_each_key_of_the_printed_state_is_defined_once() -> None:
    """In the first column of a table."""
    cells = re.findall(r"^\| (`.+?) \|", STATE, re.MULTILINE)
    defined = [key for cell in cells for key in re.findall(r"`(\w+)`", cell)]
    repeated = {key for key in defined if defined.count(key) > 1}
    assert keys_of(printed()) <= {*defined}
    assert repeated <= {"taken", "ended", "readers"}  # of a reader, and of a step


def test_the_objects_of_an_iteration_exist() -> None:
    """Classes and methods that the page and its drawing name are in the source."""
    drawing = (ROOT / "tools" / "iteration.svg").read_text()
    names = set(re.findall(r"`([A-Z]\w+(?:\.\w+)?)`", ITERATION))
    names |= set(re.findall(r'"name"[^>]*>([A-Z]\w+)', drawing))
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for name in names:
        kind, _, method = name.partition(".")
        assert re.search(rf"^class {kind}\b", source, re.MULTILINE), name
        assert not method or re.search(rf"def {method}\(", source), name


def test_no_line_is_too_long_to_read() -> None:
    """At most 120 characters, as on a screen beside the code."""
    assert max(map(len, TEXT.splitlines())) <= 120
