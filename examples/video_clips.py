"""Decode video and audio in worker processes, with PyAV: batches of clips.

Run it with ``python examples/video_clips.py``; it needs ``pip install av``.
"""

import io
import tempfile
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch

from aioloader import DataLoader
from aioloader.datasets import FileDataset

CLIPS, FRAMES, SIDE, RATE = 48, 8, 64, 16_000


def write_clip(path: Path, pitch: float) -> None:
    """Write a second of video, a moving bar, with a tone of ``pitch`` hertz."""
    with av.open(path, "w") as file:
        video = file.add_stream("mpeg4", 24, width=160, height=120)
        audio = file.add_stream("aac", 44_100, layout="mono")
        for number in range(24):
            pixels = np.zeros((120, 160, 3), np.uint8)
            pixels[:, 6 * number : 6 * number + 20] = 255
            file.mux(video.encode(av.VideoFrame.from_ndarray(pixels)))
        wave = np.sin(np.arange(44_100, dtype=np.float32) * 2 * np.pi * pitch / 44_100)
        sound = av.AudioFrame.from_ndarray(wave[None], "fltp", "mono")
        sound.sample_rate, sound.time_base = 44_100, Fraction(1, 44_100)
        file.mux(audio.encode(sound))
        file.mux([*video.encode(), *audio.encode()])


def decode(data: bytes) -> dict[str, torch.Tensor]:
    """Return evenly spaced frames, and the sound in mono, of one file."""
    with av.open(io.BytesIO(data)) as file:
        frames = list(file.decode(video=0))
        file.seek(0)
        resampler = av.AudioResampler("flt", "mono", RATE)
        sounds = [
            sound.to_ndarray()[0]
            for frame in [*file.decode(audio=0), None]
            for sound in resampler.resample(frame)
        ]
    chosen = [frames[at * (len(frames) - 1) // (FRAMES - 1)] for at in range(FRAMES)]
    pixels = [frame.reformat(SIDE, SIDE, "rgb24").to_ndarray() for frame in chosen]
    video = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
    audio = torch.from_numpy(np.concatenate(sounds))[:RATE]
    audio = torch.nn.functional.pad(audio, (0, RATE - len(audio)))
    return {"video": video, "audio": audio}


def main() -> None:
    """Write clips, and read them in batches."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(CLIPS):
            write_clip(Path(folder) / f"{number:02}.mp4", 200 + 50 * (number % 2))
        clips = FileDataset("*.mp4", root=folder)
        loader = DataLoader(
            clips, batch_size=8, shuffle=True, num_workers=2, transform=decode
        )
        for batch in loader:  # your training step
            print({name: tuple(part.shape) for name, part in batch.items()})


if __name__ == "__main__":
    main()
