"""A bucket of objects and lines, and a folder of pictures."""

import io
import os
import urllib.request
from pathlib import Path
from typing import Any

NEEDS = ("s3",)


def before(page: dict[str, Any]) -> None:
    """Fill them."""
    import numpy as np  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    objects = {f"train/{number:03d}.bin": bytes(range(32)) for number in range(32)}
    objects |= {f"lines-{number}.txt": b"line\n" * 100 for number in range(2)}
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    _request(f"{endpoint}/moto-api/reset", "POST")
    _request(f"{endpoint}/bucket", "PUT")
    for key, body in objects.items():
        _request(f"{endpoint}/bucket/{key}", "PUT", body)
    picture = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), 7, np.uint8)).save(picture, "PNG")
    for name in ("cat", "dog"):
        Path("photos", name).mkdir(parents=True)
        for number in range(4):
            Path("photos", name, f"{number}.png").write_bytes(picture.getvalue())


def _request(url: str, method: str, body: bytes = b"") -> None:
    kind = {"Content-Type": "application/octet-stream"}
    request = urllib.request.Request(url, body, kind, method=method)
    urllib.request.urlopen(request).close()
