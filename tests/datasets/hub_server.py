"""A stand-in for the Hugging Face Hub: the endpoints that its file system asks."""

import json
import re
import threading
from typing import Any
from urllib.parse import unquote, urlsplit

from datasets.serving import Handler, Server

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
        files = self.served.commits[
            self.served.main if revision == "main" else revision
        ]
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
        data = self.served.commits[
            self.served.main if revision == "main" else revision
        ][name]
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
