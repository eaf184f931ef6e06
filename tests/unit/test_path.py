"""The functions and modules that the first batch enters."""

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
    """Return the fewest functions, and their modules, of three runs by case."""
    printed = "".join(python(TOOL, check=True).stdout for _ in range(3))
    cases = re.findall(
        r"^(.+): (\d+) functions in (\d+) modules$", printed, re.MULTILINE
    )
    return {
        name: min((int(n), int(modules)) for of, n, modules in cases if of == name)
        for name in LIMITS
    }


@pytest.mark.parametrize("name", LIMITS)
def test_the_first_batch_enters_no_more_functions(
    name: str, counts: dict[str, tuple[int, int]]
) -> None:
    """Nor more modules."""
    functions, modules = counts[name]
    most_functions, most_modules = LIMITS[name]
    assert functions <= most_functions
    assert modules <= most_modules
