"""What pages read: a bucket's objects, pictures, tars."""

import io
import os
import tarfile
import urllib.request
from pathlib import Path

import numpy as np
from PIL import Image


def put(**objects: bytes) -> None:
    """Make the bucket ``bucket`` with some objects, and nothing else in the store."""
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    _request(f"{endpoint}/moto-api/reset", "POST")
    _request(f"{endpoint}/bucket", "PUT")
    for key, body in objects.items():
        _request(f"{endpoint}/bucket/{key}", "PUT", body)


def _request(url: str, method: str, body: bytes = b"") -> None:
    kind = {"Content-Type": "application/octet-stream"}
    urllib.request.urlopen(
        urllib.request.Request(url, body, kind, method=method)
    ).close()


def png(value: int) -> bytes:
    """Return a picture of 8 x 8 pixels."""
    data = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(data, "PNG")
    return data.getvalue()


def write_photos(folder: str = "photos") -> None:
    """Write pictures in two class folders."""
    for name in ("cat", "dog"):
        where = Path(folder, name)
        where.mkdir(parents=True)
        for number in range(4):
            (where / f"{number}.png").write_bytes(png(number))


def tar(count: int, first: int = 0) -> bytes:
    """Return a tar of samples with a picture and a label."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for number in range(first, first + count):
            fields = {"png": png(number % 256), "cls": str(number % 10).encode()}
            for extension, body in fields.items():
                member = tarfile.TarInfo(f"{number:05d}.{extension}")
                member.size = len(body)
                archive.addfile(member, io.BytesIO(body))
    return data.getvalue()
