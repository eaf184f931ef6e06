"""Examples that need the packages of ``make compat``: they train, resume, decode."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
STARTS = {
    "huggingface_stream": ["resumed after step 40"],
    "lightning_module": [f"training starts at step {step}" for step in (0, 0, 40)],
    "hf_trainer": [
        f"training starts from {place}" for place in ("None", "None", ".*-25")
    ],
}
# Albumentations looks for a newer version, otherwise.
SET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_ALBUMENTATIONS_UPDATE": "1"}


def ran(name: str) -> tuple[list[str], str]:
    """Run an example as a user does; return what it printed, and its errors."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        env={**os.environ, **SET},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("name", STARTS)
def test_an_example_resumes_exactly(name: str) -> None:
    """The example prints where, and that nothing differs from an unbroken run."""
    lines, _ = ran(name)
    starts = [line for line in lines if re.match("resumed|training starts", line)]
    for start, expected in zip(starts, STARTS[name], strict=True):
        assert re.fullmatch(expected, start)
    assert lines[-1].endswith("after the stop: True")


def test_augmentations_do_not_depend_on_the_number_of_workers() -> None:
    """The script has no main guard."""
    (first, second, same), errors = ran("augment")
    assert first.startswith("1 workers: crops (128, 3, 96, 96), mean ")
    assert second.removeprefix("2") == first.removeprefix("1")
    assert same == "the same crops: True"
    assert not errors


def test_clips_are_decoded_in_workers() -> None:
    """All batches have the same shape."""
    line = "{'video': (8, 8, 3, 64, 64), 'audio': (8, 16000)}"
    assert ran("video_clips") == ([line] * 6, "")


@pytest.mark.parametrize("pitch", [200, 250])
def test_a_clip_has_its_frames_and_its_sound(pitch: int, tmp_path: Path) -> None:
    """The bar moves to the right, and the tone has its pitch."""
    spec = importlib.util.spec_from_file_location("clips", EXAMPLES / "video_clips.py")
    assert spec is not None
    assert spec.loader is not None
    clips: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(clips)
    clips.write_clip(tmp_path / "a.mp4", pitch)
    sample = clips.decode((tmp_path / "a.mp4").read_bytes())
    places = sample["video"].float().mean((1, 2)).argmax(1)
    assert places.diff().gt(3).all()
    heard = torch.fft.rfft(sample["audio"]).abs().argmax()
    assert abs(int(heard) - pitch) <= 1
