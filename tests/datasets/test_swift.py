"""Signed requests to a server that checks signatures: OpenStack Swift, the real one."""

import gc
import pickle
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import obstore
import pytest
from obstore.store import S3Store

from aioloader import DataLoader
from aioloader.datasets import ObjectDataset, TarDataset
from aioloader.errors import ObjectPermissionError
from beside import beside
from datasets.conftest import CONTENTS, wait_until_hung_up
from datasets.shards import read, write_tar
from datasets.test_secrets import everything_said

ACCESS_KEY, STRANGER = "test:owner", "test:stranger"
SECRET = "MARKER7secret"
REGION = "us-east-1"
BUCKET = "bucket"
# Fewer than there are objects, so that a listing takes several pages.
PAGE = 5


class Swift:
    """A server with one bucket, which is the owner's; the stranger has no rights."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="aioloader-swift-")
        script = Path(__file__).with_name("swift_server.py")
        users = [f"{ACCESS_KEY}={SECRET}=.admin", f"{STRANGER}={SECRET}="]
        self._process = subprocess.Popen(
            # -P: it must not import the modules next to the script
            [sys.executable, "-P", script, self._folder, REGION, str(PAGE), *users],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # it must not get signals for the tests
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
        shutil.rmtree(self._folder, ignore_errors=True)  # if it did not start


@pytest.fixture(scope="session")
def swift() -> Iterator[Swift]:
    served = Swift()
    yield served
    served.close()


pytestmark = pytest.mark.slow

Use: TypeAlias = Callable[[str], Awaitable[Any]]


@pytest.fixture(scope="session")
def filled(swift: Swift, tmp_path_factory: pytest.TempPathFactory) -> Swift:
    folder = tmp_path_factory.mktemp("shards")
    write_tar(folder)
    objects = {f"train/{key}": body for key, body in CONTENTS.items()}
    objects |= {f"tar/{path.name}": path.read_bytes() for path in folder.glob("*.tar")}
    assert len(objects) > 2 * PAGE
    for key, body in objects.items():
        obstore.put(swift.store(), key, body, use_multipart=False)
    return swift


@pytest.fixture
def bucket(filled: Swift, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in filled.options().items():
        monkeypatch.setenv(f"AWS_{name}".upper(), value)
    yield f"s3://{BUCKET}"
    gc.collect()  # datasets that the test did not close
    wait_until_hung_up(filled.port)


USES: list[tuple[Use, str]] = [
    (lambda url: ObjectDataset(url, ["train/cats/z.bin"])[0], "train/cats/z.bin"),
    (lambda url: ObjectDataset.discover(url, prefix="train"), "train"),
    (lambda url: read(TarDataset(f"{url}/tar/0.tar")), "tar/0.tar"),
    (lambda url: read(TarDataset(f"{url}/tar/*.tar")), "tar"),
]


@pytest.mark.parametrize(("use", "place"), USES)
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("AWS_SECRET_ACCESS_KEY", f"not-{SECRET}"),
        ("AWS_ACCESS_KEY_ID", "test:nobody"),
        ("AWS_ACCESS_KEY_ID", STRANGER),
    ],
    ids=["secret", "nobody", "stranger"],
)
async def test_refused_requests_show_no_secret(
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    use: Use,
    place: str,
    variable: str,
    value: str,
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ObjectPermissionError, match="403 Forbidden; check") as caught:
        await use(bucket)
    error = caught.value
    assert error.location == f"{bucket}/{place}"
    assert f"{bucket}/{place}" in str(error)
    assert error.attempts == 1
    said = everything_said(error)
    # Nor the server's details: the user, the string to sign, and the signature.
    for word in (SECRET, "test:", "StringToSign", "SignatureProvided"):
        assert word not in said


async def test_options_take_precedence_over_the_environment(
    filled: Swift, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    keys = ["train/cats/z.bin"]
    async with ObjectDataset(bucket, keys, store_options=filled.options()) as dataset:
        assert bytes(await dataset[0]) == CONTENTS["cats/z.bin"]
    wrong = filled.options(secret=f"not-{SECRET}")
    async with ObjectDataset(bucket, keys, store_options=wrong) as dataset:
        with pytest.raises(ObjectPermissionError, match="HTTP 403 Forb") as caught:
            await dataset[0]
    with pytest.raises(pickle.PicklingError, match="secret_access_key") as refused:
        pickle.dumps(dataset)
    loader = DataLoader(
        ObjectDataset(bucket, keys, store_options=filled.options()),
        num_workers=1,
        collate_fn=list,
    )
    ((data,),) = await beside(lambda: list(loader))
    assert bytes(data) == CONTENTS["cats/z.bin"]
    stream = TarDataset(f"{bucket}/tar/*.tar", store_options=wrong)
    with pytest.raises(ObjectPermissionError, match="HTTP 403 Forb") as listed:
        await read(stream)
    said = [*map(everything_said, (caught.value, refused.value, listed.value))]
    for text in (*said, repr(dataset), repr(stream)):
        assert SECRET not in text
        assert ACCESS_KEY not in text
