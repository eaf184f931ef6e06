"""``hf://``: what ``huggingface_hub`` reads, from a stand-in for its endpoint."""

import asyncio
import json
import pickle
import re
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from aioloader.datasets import JSONLinesDataset, TarDataset, TextDataset
from aioloader.datasets._stores.requests import Requests
from aioloader.errors import DatasetError, ObjectNotFoundError
from datasets.serving import Handler, Server
from datasets.shards import LENGTHS, NAMES, names, write_tar, write_text

REPO = "someone/shards"
TOKEN = "hf_canary"


class _Handler(Handler):
    """Answers one connection; it is closed after each answer."""

    def get(self) -> None:
        hub, path = self.served, unquote(urlsplit(self.path).path)
        hub.seen.append(f"GET {path}")
        if hub.token and self.headers["authorization"] != f"Bearer {hub.token}":
            self.say(401, {"error": "Repository not found"}, "RepoNotFound")
        elif match := re.fullmatch(rf"/api/datasets/{REPO}(?:/revision/(\w+))?", path):
            self.about(match[1] or "main")
        elif match := re.fullmatch(rf"/api/datasets/{REPO}/tree/(\w+)/?(.*)", path):
            self.tree(match[1], match[2])
        elif match := re.fullmatch(rf"/datasets/{REPO}/resolve/(\w+)/(.*)", path):
            self.file(match[1], match[2])
        else:
            self.say(404, {"error": "Repository not found"}, "RepoNotFound")

    def about(self, revision: str) -> None:
        sha = self.served.main if revision == "main" else revision
        self.say(200, {"id": REPO, "sha": sha, "siblings": [], "private": False})

    def tree(self, revision: str, folder: str) -> None:
        files = self.served.files(revision)
        start = f"{folder}/" if folder else ""
        names = [name for name in files if name.startswith(start)]
        found: dict[str, Any] = {}
        for name in names:
            first, *rest = name.removeprefix(start).split("/")
            if rest:
                path = start + first
                found[path] = {"type": "directory", "path": path, "oid": "d", "size": 0}
            if not rest or "recursive=true" in self.path.lower():
                size = len(files[name])
                oid = f"{hash(files[name]) & 0xFFFFFF:040x}"
                found[name] = {"type": "file", "path": name, "oid": oid, "size": size}
        if not names:
            self.say(404, {"error": "no such folder"}, "EntryNotFound")
        else:
            self.say(200, list(found.values()))

    def file(self, revision: str, name: str) -> None:
        self.served.reads.wait()
        if self.served.fail:
            self.say(self.served.fail.pop(), {"error": "busy"})
            return
        data = self.served.files(revision)[name]
        first, last = map(int, self.headers["range"].removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        self.answer(206, part, {"content-range": f"bytes {first}-{last}/{len(data)}"})

    def say(self, status: int, said: Any, code: str = "") -> None:
        fields = {"content-type": "application/json"}
        fields |= {"x-error-code": code} if code else {}
        self.answer(status, json.dumps(said).encode(), fields)


class Hub(Server):
    """One dataset repository, with a branch that can be moved.

    Attributes:
        commits: Files of each commit, by name.
        main: The commit that the branch names.
        seen: Requests, as method and path.
        fail: Statuses of the next answers to reads.
        reads: Set when it answers reads.
    """

    handler = _Handler

    def __init__(self, files: dict[str, bytes]) -> None:
        self.commits = {"a" * 40: files}
        self.main = "a" * 40
        self.seen: list[str] = []
        self.fail: list[int] = []
        self.reads = threading.Event()
        self.reads.set()
        self.token = ""

    def files(self, revision: str) -> dict[str, bytes]:
        return self.commits[self.main if revision == "main" else revision]


ROOT = f"hf://datasets/{REPO}"
QUICK = Requests(base_delay=0.001, max_delay=0.01, deadline=5)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    # From a cold disk it may take longer than QUICK allows a request.
    from huggingface_hub import HfFileSystem  # noqa: F401, PLC0415

    write_tar(tmp_path)
    write_text(tmp_path)
    files = {f"data/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}
    with Hub({**files, "README.md": b"words"}) as hub:
        yield hub


def options(hub: Hub, **more: Any) -> dict[str, Any]:
    return {"store_options": {"endpoint": hub.url, **more}, "requests": QUICK}


@pytest.mark.parametrize("ways", ["braces", "star", "store"])
async def test_every_way_to_name_shards(ways: str, hub: Hub) -> None:
    pattern = {"braces": "data/{0..7}.tar"}.get(ways, "data/*.tar")
    if ways == "store":
        stream = TarDataset(pattern, store=ROOT, **options(hub))
        stream = pickle.loads(pickle.dumps(stream))
    else:
        stream = TarDataset(f"{ROOT}/{pattern}", **options(hub))
    assert await names(stream) == NAMES


async def test_the_endpoint_of_the_environment(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether ``huggingface_hub`` was imported before or not."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    stream = TextDataset(f"{ROOT}/data/*.txt", requests=QUICK)
    assert await names(stream.shard(1, 2)) != []


async def test_a_branch_that_moves_is_not_followed(hub: Hub) -> None:
    stream = TextDataset(f"{ROOT}/data/{{0..7}}.txt", **options(hub))
    async with aiter(stream) as iterator:
        found = [await anext(iterator)]
        hub.commits["b" * 40] = {"data/0.txt": b"other\n"}
        hub.main = "b" * 40
        found += [name async for name in iterator]
    assert found == NAMES
    assert await names(TextDataset(f"{ROOT}/data/*.txt", **options(hub))) == ["other"]


@pytest.mark.slow
async def test_failures_are_tried_again(hub: Hub) -> None:
    hub.fail = [408, 425, 408]  # the client tries 429 and 5xx again itself, slowly
    assert await names(TextDataset(f"{ROOT}/data/*.txt", **options(hub))) == NAMES
    with pytest.raises(ObjectNotFoundError, match=r"no such file: 'hf://.*/none\.txt'"):
        await names(TextDataset(f"{ROOT}/data/none.txt", **options(hub)))
    with pytest.raises(ValueError, match="no shard matches"):
        await names(TextDataset(f"{ROOT}/data/*.none", **options(hub)))


async def test_tokens_are_sent_and_never_shown(hub: Hub) -> None:
    hub.token = TOKEN
    stream = JSONLinesDataset(f"{ROOT}/README.md", **options(hub, token=TOKEN))
    with pytest.raises(DatasetError, match="byte 0 is damaged"):
        await names(stream)
    assert TOKEN not in repr(stream)
    with pytest.raises(pickle.PicklingError, match="store options token in clear"):
        pickle.dumps(TextDataset("x", store=ROOT, **options(hub, token=TOKEN)))
    wrong = f"{TOKEN}-wrong"
    with pytest.raises(DatasetError, match=r"HF_TOKEN|may not read") as caught:
        await names(TextDataset(f"{ROOT}/README.md", **options(hub, token=wrong)))
    assert TOKEN not in "".join(traceback.format_exception(caught.value))


async def test_the_users_threads_are_free(hub: Hub) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    hub.reads.clear()
    stream = TextDataset(f"{ROOT}/data/{{0..7}}.txt", **options(hub))
    reading = asyncio.create_task(names(stream))
    try:
        while not any("resolve" in one for one in hub.seen):
            await asyncio.to_thread(int)
        async with asyncio.timeout(QUICK.deadline):
            await asyncio.to_thread(int)
    finally:
        hub.reads.set()
    assert len(await reading) == sum(LENGTHS)


def test_wrong_options_are_named() -> None:
    with pytest.raises(TypeError, match=r"region; it has 'token' and 'endpoint'"):
        TextDataset("x", store=ROOT, store_options={"region": "here"})
