"""A bucket of tars, with a pack, as the page's command writes it."""

import asyncio
import os
import subprocess
import sys
import urllib.request
from typing import Any

NEEDS = ("s3",)


def before(page: dict[str, Any]) -> None:
    """Fill it."""
    from aioloader.datasets import TarWriter  # noqa: PLC0415

    async def write() -> None:
        async with TarWriter("s3://bucket", "train", shard_samples=500) as writer:
            for number in range(writer.next_sample, 64 * 500):
                await writer.write({"cls": number % 10, "id": number})

    endpoint = os.environ["AWS_ENDPOINT_URL"]
    for path, method in ("moto-api/reset", "POST"), ("bucket", "PUT"):
        request = urllib.request.Request(f"{endpoint}/{path}", b"", method=method)
        urllib.request.urlopen(request).close()
    asyncio.run(write())
    command = "index s3://bucket/train-*.tar --pack s3://bucket/train.aioidx -q"
    subprocess.run([sys.executable, "-m", "aioloader", *command.split()], check=True)
