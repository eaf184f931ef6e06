"""The cores and the memory that a process may use, in a container too."""

import os
from pathlib import Path

import pytest

from aioloader._base.machine import cores, memory_left


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one rank on this machine, which has eight cores."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))


def written(folder: Path, **files: str) -> Path:
    """Write the files of a control group; ``__`` stands for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_quotas_of_both_cgroup_versions_limit_cores(tmp_path: Path) -> None:
    """To whole cores, at least one."""
    assert cores(tmp_path) == 8
    assert cores(written(tmp_path, cpu__max="max 100000\n")) == 8
    assert cores(written(tmp_path / "a", cpu__max="250000 100000\n")) == 2
    assert cores(written(tmp_path / "b", cpu__max="20000 100000\n")) == 1
    quota = {"cpu__cfs_quota_us": "300000\n", "cpu__cfs_period_us": "100000\n"}
    written(tmp_path / "c" / "cpu", **quota)
    assert cores(tmp_path / "c") == 3
    quota["cpu__cfs_quota_us"] = "-1\n"
    written(tmp_path / "c" / "cpu", **quota)
    assert cores(tmp_path / "c") == 8


def test_ranks_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has at least one."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert cores(tmp_path) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert cores(tmp_path) == 1


@pytest.mark.parametrize(
    ("folder", "most", "used"),
    [
        ("", "memory__max", "memory__current"),
        ("memory", "memory__limit_in_bytes", "memory__usage_in_bytes"),
    ],
)
def test_cached_files_do_not_count_as_used_memory(
    tmp_path: Path, folder: str, most: str, used: str
) -> None:
    """The kernel can drop these pages at once."""
    free = memory_left(tmp_path)
    stat = "anon 100\nfile 800\nshmem 50\ninactive_file 400\nactive_file 350\n"
    group = written(tmp_path / folder, memory__stat=stat, **{used: "900\n"})
    for unlimited in ("max\n", "9223372036854771712\n"):
        written(group, **{most: unlimited})
        assert memory_left(tmp_path) > free // 2 > 1000
    written(group, **{most: "1000\n"})
    assert memory_left(tmp_path) == 1000 - 900 + 750
