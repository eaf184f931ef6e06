#!/usr/bin/env bash
# One call on a machine with a GPU: builds, checks, measures, and prints the tables.
#
#     benchmarks/gpu.sh                      # ten minutes at most, the installation apart
#     PYTHON=python3.12 benchmarks/gpu.sh --rounds 1
#
# Arguments go to benchmarks/device.py. A torch that sees the GPU is used as it is; else
# one is installed. Where there is no network, pip finds wheels by its own PIP_NO_INDEX
# and PIP_FIND_LINKS. The exit status tells whether all of it went well.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
venv=${VENV:-${TMPDIR:-/tmp}/aioloader-gpu}
sees_gpu='import sys, torch; sys.exit(not torch.cuda.is_available())'

echo "== build"
"$python" -m venv --system-site-packages --clear "$venv"
bin=$venv/bin
paths=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$PWD/src" > "$paths/aioloader-checkout.pth"
constraints=(-c constraints.txt)
if "$python" -c "$sees_gpu" 2> /dev/null; then
    # it may itself be in an environment, which --system-site-packages does not reach
    "$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' \
        > "$paths/torch-that-was-here.pth"
    constraints=()
fi
"$bin/python" - > "$venv/needed.txt" << 'END'
import re
import tomllib
from pathlib import Path

settings = tomllib.loads(Path("pyproject.toml").read_text())
project, groups = settings["project"], settings["dependency-groups"]
tools = {"pytest", "pytest-asyncio", "hypothesis", "blockbuster"}
extra = [one for one in groups["test"] if re.match(r"[\w-]+", one)[0] in tools]
needed = project["dependencies"] + project["optional-dependencies"]["objects"] + extra
print("\n".join(needed))
END
"$bin/python" -m pip install --quiet --disable-pip-version-check \
    "${constraints[@]}" -r "$venv/needed.txt"
"$bin/python" -m pip install --quiet --disable-pip-version-check \
    "${constraints[@]}" "spdl>=0.8" || echo "without SPDL: it cannot be installed here"
if ! "$bin/python" -c "$sees_gpu"; then
    echo "torch sees no GPU here: nothing to check or to measure" >&2
    exit 2
fi
"$bin/python" - << 'END'
import sys

import torch

found = torch.cuda.get_device_properties(0)
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {found.name},")
print(f"{found.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
END

status=0
echo "== check: on the GPU"
"$bin/python" -m pytest -q -m cuda tests/device --durations=5 || status=1
echo "== check: on the CPU"
"$bin/python" -m pytest -q -m "not cuda" tests/device || status=1
echo "== measure"
"$bin/python" benchmarks/device.py "$@" || status=1
exit $status
