#!/usr/bin/env bash
# One call on a machine with a GPU: builds an environment, checks, measures.
#
#     benchmarks/gpu.sh                      # ten minutes at most, the installation apart
#     PYTHON=python3.12 benchmarks/gpu.sh --json gpu.json
#
# Arguments go to tools/check_gpu.py. A torch that sees the GPU is used as it is; else
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
echo "== check and measure"
exec "$bin/python" tools/check_gpu.py "$@"
