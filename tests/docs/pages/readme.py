"""What the README's snippets read: a bucket, pictures, names of the reader's own."""

from typing import Any

NEEDS = ("s3",)
NOT_RUN = {'device="cuda"': "needs a GPU"}


def before(page: dict[str, Any]) -> None:
    """Make it."""
    import torch  # noqa: PLC0415
    from torch.utils.data import TensorDataset  # noqa: PLC0415

    from aioloader.datasets import Decoder, FileDataset, TarWriter  # noqa: PLC0415
    from docs import stand_ins  # noqa: PLC0415

    stand_ins.put(**{f"train/{number:03d}.bin": bytes(32) for number in range(64)})
    stand_ins.write_photos()
    page |= {
        "dataset": TensorDataset(torch.arange(256)),
        "Decoder": Decoder,
        "FileDataset": FileDataset,
        "TarWriter": TarWriter,
        "labels": list(range(4)),
        "samples": [stand_ins.png(number) for number in range(4)],
        "saved": {},
        "step": lambda *batch: None,
    }
