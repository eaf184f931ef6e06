"""A real OpenStack Swift with s3api, for tests: it checks the signature of requests.

Import the fixture where it is used. The server is a process of its own; however the
tests end, it ends with them, and its folder goes.
"""

import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import S3Store

ACCESS_KEY, STRANGER = "test:owner", "test:stranger"
SECRET = "MARKER7secret"
REGION = "us-east-1"
BUCKET = "bucket"
# Less than there are objects: a listing takes several pages.
PAGE = 5


class Swift:
    """A server with one bucket, which is the owner's; the stranger has no rights."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="aioloader-swift-")
        script = Path(__file__).with_name("swift_server.py")
        users = [f"{ACCESS_KEY}={SECRET}=.admin", f"{STRANGER}={SECRET}="]
        self._process = subprocess.Popen(
            # -P: else this very file would be the module that the script imports
            [sys.executable, "-P", script, self._folder, REGION, str(PAGE), *users],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a signal for the tests is not for it
        )
        assert self._process.stdout is not None
        with self._process.stdout as said:
            line = said.readline()
        if not line:
            self.close()
            raise RuntimeError("Swift did not start; what it said is on stderr")
        self.port = int(line)
        self.endpoint = f"http://127.0.0.1:{self.port}"
        url = obstore.sign(self.store(), "PUT", "", timedelta(minutes=1))
        urllib.request.urlopen(urllib.request.Request(url, method="PUT")).close()

    def options(self, key: str = ACCESS_KEY, secret: str = SECRET) -> dict[str, Any]:
        return {
            "endpoint": self.endpoint,
            "region": REGION,
            "access_key_id": key,
            "secret_access_key": secret,
        }

    def store(self) -> S3Store:
        client: Any = {"allow_http": True}
        return S3Store(BUCKET, client_options=client, **self.options())

    def close(self) -> None:
        self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)  # of one that did not start


@pytest.fixture(scope="session")
def swift() -> Iterator[Swift]:
    served = Swift()
    yield served
    served.close()
