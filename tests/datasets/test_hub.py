"""``hf://``: what ``huggingface_hub`` reads, from a stand-in for its endpoint."""

import asyncio
import pickle
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from aioloader.datasets import JSONLinesDataset, TarDataset, TextDataset
from aioloader.datasets._stores.requests import Requests
from aioloader.errors import DatasetError, ObjectNotFoundError
from datasets.hub_server import REPO, TOKEN, Hub
from datasets.shards import LENGTHS, NAMES, names, write_tar, write_text

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


async def test_resumes_and_is_cut(hub: Hub) -> None:
    stream = TextDataset(f"{ROOT}/data/3.txt", **options(hub))
    parts = [await names(stream.shard(rank, 3)) for rank in range(3)]
    assert [len(part) > 0 for part in parts] == [True] * 3
    assert sum(map(len, parts)) == LENGTHS[3]
    async with aiter(stream) as iterator:
        before = [await anext(iterator) for _ in range(5)]
        state = iterator.state_dict()
    stream.load_state_dict(state)
    assert before + await names(stream) == [f"3-{at}" for at in range(LENGTHS[3])]


async def test_a_branch_that_moves_is_not_followed(hub: Hub) -> None:
    stream = TextDataset(f"{ROOT}/data/{{0..7}}.txt", **options(hub))
    async with aiter(stream) as iterator:
        found = [await anext(iterator)]
        hub.commits["b" * 40] = {"data/0.txt": b"other\n"}
        hub.main = "b" * 40
        found += [name async for name in iterator]
    assert found == NAMES
    assert await names(TextDataset(f"{ROOT}/data/*.txt", **options(hub))) == ["other"]


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


def test_a_stream_can_be_sent(hub: Hub) -> None:
    stream = TextDataset("data/*.txt", store=ROOT, **options(hub))
    copy = pickle.loads(pickle.dumps(stream))
    assert asyncio.run(names(copy)) == NAMES
