"""Run the cells of a file one by one in ``__main__``, as notebook runners do."""

import re
import sys
import types
from pathlib import Path

module = types.ModuleType("__main__")
text = Path(sys.argv[1]).read_text(encoding="utf-8")
sys.modules["__main__"] = module
for cell in re.split(r"^# %%\n", text, flags=re.MULTILINE):
    exec(compile(cell, "<cell>", "exec"), module.__dict__)
