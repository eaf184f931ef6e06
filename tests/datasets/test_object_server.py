"""The object server of the tests: that it is honest, and that its faults are faults."""

import contextlib
import http.client
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from object_server import Faults, ObjectServer

DATA = bytes(range(256)) * 5000
OBJECTS = {"a b": b"spaced", "big": DATA, "ünicode & <x>": b"x", "100%": b"", "e": b""}
BROKEN = (http.client.HTTPException, OSError)


def ask(server: ObjectServer, path: str, **fields: str) -> tuple[int, bytes, Any]:
    """Return status, body and fields of an answer to a plain client."""
    address = urlsplit(server.url).netloc
    with contextlib.closing(http.client.HTTPConnection(address, timeout=10)) as client:
        named = {name.replace("_", "-"): value for name, value in fields.items()}
        client.request("GET", quote(path), headers=named)
        response = client.getresponse()
        return response.status, response.read(), response.headers


@pytest.mark.parametrize("kind", ["errors", "resets", "truncated", "lying", "hangs"])
def test_faults(kind: str) -> None:
    """Each breaks the answer in its way; nothing gives away a lie."""
    faults: dict[str, Any] = {kind: 1}
    with ThreadPoolExecutor(1) as pool:
        with ObjectServer(OBJECTS, faults=Faults(**faults)) as server:
            asking = pool.submit(ask, server, "/big", Range="bytes=0-99999")
            server.wait_for(lambda: server.injected()[kind] == 1)
            server.faults = Faults()
            assert ask(server, "/big")[1] == DATA  # others are served meanwhile
        if kind not in {"errors", "lying"}:
            assert isinstance(asking.exception(10), BROKEN)
            return
    status, body, fields = asking.result()
    if kind == "errors":
        assert status in {500, 503}
    else:
        assert (status, len(body) < 100_000) == (206, True)
        assert fields["Content-Range"] == f"bytes 0-99999/{len(DATA)}"
