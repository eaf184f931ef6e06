"""Serve an S3 bucket on loopback with moto, for examples that need a store.

It is not run by itself: other examples import ``bucket``.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch
from urllib.request import Request, urlopen

from moto.server import ThreadedMotoServer

ACCESS = {
    "AWS_ACCESS_KEY_ID": "anybody",
    "AWS_SECRET_ACCESS_KEY": "any",
    "AWS_REGION": "us-east-1",
}


@contextmanager
def bucket(name: str) -> Iterator[str]:
    """Serve an empty bucket; yield the endpoint, which is in the environment too."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # no line per request
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    with patch.dict(os.environ, ACCESS):
        server.start()
        try:
            host, port = server.get_host_and_port()
            endpoint = f"http://{host}:{port}"
            os.environ["AWS_ENDPOINT_URL"] = endpoint
            create(endpoint, name)
            yield endpoint
        finally:
            server.stop()


def create(endpoint: str, name: str) -> None:
    """Create a bucket with a PUT, which moto accepts unsigned."""
    with urlopen(Request(f"{endpoint}/{name}", method="PUT")):
        pass
