"""Writers that are killed by SIGKILL before any operation, and begun again."""

import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import obstore
import pyarrow.parquet as pq
import pytest
from obstore.store import S3Store

from datasets.killed_writing import (
    LARGE_BYTES,
    LARGE_SAMPLES,
    SAMPLES,
    SIGKILLED,
    run,
)

pytestmark = pytest.mark.slow


def texts(kind: str, data: bytes) -> list[str]:
    if kind == "parquet":
        column: list[str] = pq.read_table(BytesIO(data))["txt"].to_pylist()
        return column
    with tarfile.open(fileobj=BytesIO(data)) as tar:
        members: list[Any] = [
            tar.extractfile(member) for member in tar if member.name.endswith("txt")
        ]
        assert data.endswith(bytes(1024))
        return [member.read().decode() for member in members]


def seen(kind: str, folder: Path) -> list[str]:
    shards = sorted(folder.glob(f"*.{kind}"))
    return [text for shard in shards for text in texts(kind, shard.read_bytes())]


@pytest.mark.slow
@pytest.mark.parametrize(
    "numbers",
    [
        # Of the beginning, of one shard, and one after the end.
        pytest.param([2, 3, 4, 5, 6, 7, 8, 11, 15, 16, 24], id="some"),
        pytest.param(range(26), marks=pytest.mark.fuzz, id="all"),
    ],
)
def test_killed_before_any_operation(tmp_path: Path, numbers: list[int]) -> None:
    """Readers see whole shards; the next process writes the rest, to the same bytes."""
    expected = [str(number) for number in range(SAMPLES)]
    jobs = [
        (kind, str(tmp_path / f"{kind}-{number}"), number)
        for kind in ("tar", "parquet")
        for number in numbers
        if kind == "tar" or number % 4 == 0
    ]
    ended = run("kill", jobs)
    killed = [job for job, end in zip(jobs, ended, strict=True) if end == SIGKILLED]
    assert set(ended) == {SIGKILLED, 0}  # the last ones had no operation left
    counts = set()
    for kind, folder, _ in killed:
        found = seen(kind, Path(folder))
        assert found == expected[: len(found)]
        counts.add(len(found))
    assert counts == {0, 6, 12, 18}
    assert set(run("write", jobs)) == {0}
    files: dict[str, list[Any]] = {}
    for kind, folder, _ in jobs:
        assert seen(kind, Path(folder)) == expected
        content = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        files.setdefault(kind, []).append(content)
    assert all(one == every[0] for every in files.values() for one in every)


@pytest.mark.slow
@pytest.mark.parametrize(
    "numbers",
    [[7, 13], pytest.param([3, 5, 6, 7, 8, 10, 12, 13], marks=pytest.mark.fuzz)],
    ids=["some", "all"],
)
def test_killed_while_it_uploads(s3: str, s3_port: int, numbers: list[int]) -> None:
    """A store shows no part of an upload; each sample is there once in the end."""
    base = f"{s3}-killed-{len(numbers)}"
    jobs = [("tar", f"{base}-{number}", number) for number in numbers]
    assert set(run("kill", jobs)) == {SIGKILLED}
    store = S3Store("bucket", client_options={"allow_http": True})

    def found() -> dict[str, list[str]]:
        content: dict[str, list[str]] = {job[1]: [] for job in jobs}
        keys = [meta["path"] for page in obstore.list(store) for meta in page]
        for key in sorted(keys):
            folder, _, file = f"s3://bucket/{key}".rpartition("/")
            if folder in content and file.endswith("tar"):
                data = bytes(obstore.get(store, key).bytes())
                content[folder] += texts("tar", data)
                assert len(data) > 2 * LARGE_BYTES
        return content

    counts = [len(content) for content in found().values()]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 4)
    assert set(run("write", jobs)) == {0}
    expected = [str(number) for number in range(LARGE_SAMPLES)]
    assert all(content == expected for content in found().values())
