"""Examples that need packages of this environment: Albumentations, PyAV."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def ran(name: str) -> list[str]:
    """Run an example as a user does; return what it printed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
        # it looks for a newer version, otherwise
        env={**os.environ, "NO_ALBUMENTATIONS_UPDATE": "1"},
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_augmentations_do_not_depend_on_the_number_of_workers() -> None:
    """A script without a main guard."""
    one, two, same = ran("augment.py")
    assert one.startswith("1 workers: crops (128, 3, 96, 96), mean ")
    assert two.removeprefix("2") == one.removeprefix("1")
    assert same == "the same crops: True"


def test_clips_are_decoded_in_workers() -> None:
    """All of them, in batches of one shape."""
    line = "{'video': (8, 8, 3, 64, 64), 'audio': (8, 16000)}"
    assert ran("video_clips.py") == [line] * 6


@pytest.mark.parametrize("pitch", [200, 250])
def test_a_clip_has_its_frames_and_its_sound(pitch: int, tmp_path: Path) -> None:
    """The bar moves to the right; the tone has its pitch."""
    found = importlib.util.spec_from_file_location("clips", EXAMPLES / "video_clips.py")
    assert found is not None
    assert found.loader is not None
    clips: Any = importlib.util.module_from_spec(found)
    found.loader.exec_module(clips)
    clips.write_clip(tmp_path / "a.mp4", pitch)
    sample = clips.decode((tmp_path / "a.mp4").read_bytes())
    places = sample["video"].float().mean((1, 2)).argmax(1)
    assert places.diff().gt(3).all()
    heard = torch.fft.rfft(sample["audio"]).abs().argmax()
    assert abs(int(heard) - pitch) <= 1
