"""Every public name has a type that all type checkers read alike."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PYRIGHT = Path(sys.executable).with_name("pyright")


@pytest.mark.slow
@pytest.mark.skipif(not PYRIGHT.exists(), reason="pyright is in the group `lint`")
def test_public_names_have_types(tmp_path: Path) -> None:
    """Except a class that derives from an untyped package."""
    arguments = ["--verifytypes", "aioloader", "--ignoreexternal", "--outputjson"]
    path = os.pathsep.join([str(PYRIGHT.parent), os.environ["PATH"]])
    done = subprocess.run(
        [PYRIGHT, *arguments],
        capture_output=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        text=True,
    )
    report = json.loads(done.stdout)["typeCompleteness"]
    unknown = [
        symbol["name"]
        for symbol in report["symbols"]
        if not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]
    ]
    assert set(unknown) <= {"aioloader.accelerate.AsyncIterableDatasetShard"}
    assert report["completenessScore"] >= 0.99
