"""A stand-in for the Hugging Face Hub: the endpoints that its file system asks."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

REPO = "someone/shards"
TOKEN = "hf_canary"


class Hub:
    """One dataset repository, with a branch that can be moved.

    Attributes:
        commits: Files of each commit, by name.
        main: The commit that the branch names.
        seen: Requests, as method and path.
        fail: Statuses of the next answers to reads.
        reads: Set when it answers reads.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.commits = {"a" * 40: files}
        self.main = "a" * 40
        self.seen: list[str] = []
        self.fail: list[int] = []
        self.reads = threading.Event()
        self.reads.set()
        self.token = ""

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = False
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection; it is closed after each answer."""

    hub: Hub

    def log_message(self, *_args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer about the repository, a folder, or with a file."""
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.seen.append(f"GET {path}")
        if hub.token and self.headers["authorization"] != f"Bearer {hub.token}":
            self.answer(401, {"error": "Repository not found"}, "RepoNotFound")
        elif match := re.fullmatch(rf"/api/datasets/{REPO}(?:/revision/(\w+))?", path):
            self.about(match[1] or "main")
        elif match := re.fullmatch(rf"/api/datasets/{REPO}/tree/(\w+)/?(.*)", path):
            self.tree(match[1], match[2])
        elif match := re.fullmatch(rf"/datasets/{REPO}/resolve/(\w+)/(.*)", path):
            self.file(match[1], match[2])
        else:
            self.answer(404, {"error": "Repository not found"}, "RepoNotFound")

    def about(self, revision: str) -> None:
        """Return the commit of a revision."""
        sha = self.hub.main if revision == "main" else revision
        self.answer(200, {"id": REPO, "sha": sha, "siblings": [], "private": False})

    def tree(self, revision: str, folder: str) -> None:
        """Return the files under a folder, and the folders in it."""
        files = self.hub.commits[self.hub.main if revision == "main" else revision]
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
            self.answer(404, {"error": "no such folder"}, "EntryNotFound")
        else:
            self.answer(200, list(found.values()))

    def file(self, revision: str, name: str) -> None:
        """Return a range of a file."""
        self.hub.reads.wait()
        if self.hub.fail:
            self.answer(self.hub.fail.pop(), {"error": "busy"})
            return
        data = self.hub.commits[self.hub.main if revision == "main" else revision][name]
        first, last = map(int, self.headers["range"].removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        self.send_response(206)
        self.send_header("content-range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("content-length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def answer(self, status: int, said: Any, code: str = "") -> None:
        """Send JSON."""
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        if code:
            self.send_header("x-error-code", code)
        self.end_headers()
        self.wfile.write(body)
