"""The functions and modules that the first batch enters."""

import json
import re
from pathlib import Path

import pytest

from python_process import python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "count_path.py"
# Functions, modules. Lower them with the code; a number that must go up needs a reason.
# With coroutines some functions more or less are entered: tasks take turns differently.
LIMITS = {
    "for": (80, 16),  # one guards attributes, in place of torch's own
    "for, two workers": (188, 39),
    "async for, async dataset": (180, 28),
    "async for, tar": (350, 54),
}


@pytest.fixture(scope="module")
def counts() -> dict[str, tuple[int, int]]:
    """Return the numbers of functions and modules by case, as the tool prints them."""
    printed = python(TOOL, check=True).stdout
    cases = re.findall(
        r"^(.+): (\d+) functions in (\d+) modules$", printed, re.MULTILINE
    )
    return {name: (int(functions), int(modules)) for name, functions, modules in cases}


@pytest.mark.parametrize("name", LIMITS)
def test_the_first_batch_enters_no_more_functions(
    name: str, counts: dict[str, tuple[int, int]]
) -> None:
    """Nor more modules."""
    functions, modules = counts[name]
    most_functions, most_modules = LIMITS[name]
    assert functions <= most_functions
    assert modules <= most_modules


def _told() -> dict[str, list[str]]:
    """Return the functions that ``CONTRIBUTING.md`` names for each runner."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    lines = text.partition("**Followed through the runners.**")[2].splitlines()[2:]
    told = {}
    for line in lines[: lines.index("")]:
        name, _, path = line.removeprefix("- **").partition("**: ")
        told[name] = re.findall(r"`([\w.]+)`(?= →|$| \()", path)
    return told


@pytest.fixture(scope="module")
def entered() -> dict[str, list[list[str]]]:
    """Return what the first batch enters in each process, by runner, in order."""
    code = (
        "import json, os, sys; sys.path.insert(0, sys.argv[1])\n"
        "import count_path as c\n"
        "from pathlib import Path; import aioloader\n"
        "root, paths = Path(aioloader.__file__).parent, {}\n"
        "for name, run in c.RUNNERS.items():\n"
        "    run()\n"
        "    ran = c.followed(run, root)\n"
        "    paths[name] = [ran.pop(os.getpid())]\n"
        "    paths[name + ', in the worker'] = list(ran.values())\n"
        "print(json.dumps(paths))\n"
    )
    printed = python("-c", code, TOOL.parent, check=True).stdout
    paths: dict[str, list[list[str]]] = json.loads(printed.splitlines()[-1])
    return paths


@pytest.mark.parametrize("runner", _told())
def test_contributing_names_the_path_of_a_batch(
    runner: str, entered: dict[str, list[list[str]]]
) -> None:
    """A batch passes the functions that it names for a runner, in that order."""
    told = _told()[runner]
    assert len(told) > 5
    followed = [
        [name for name in path if name in set(told)] for path in entered[runner]
    ]
    assert told in followed
