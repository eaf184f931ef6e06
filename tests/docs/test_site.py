"""The built site: no dead link, nothing from elsewhere, no error in a browser."""

import contextlib
import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import pytest

SITE = Path(__file__).parents[2] / "site"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PAGES, reason="the site is not built: make docs"),
]
BASE = "https://site.invalid/"

# Shows every page in a frame, as wide as a phone and as a desk's screen; notes what is
# wider than that.
WALKER = """<!doctype html><title>walking</title><body><script>
const pages = PAGES, found = [];
async function walk() {
  for (const page of pages) {
    const frame = document.createElement("iframe");
    frame.height = 800; frame.width = 390;
    await new Promise(resolve => {
      frame.onload = resolve; frame.src = page; document.body.append(frame);
    });
    if (!frame.contentDocument.querySelector("h1")) found.push(page + ": no heading");
    for (const width of [390, 1200]) {
      frame.width = width;
      await new Promise(resolve => setTimeout(resolve, 50));
      const wide = frame.contentDocument.documentElement.scrollWidth;
      if (wide > width) found.push(`${page}: ${wide} of ${width} wide`);
    }
    frame.remove();
  }
  document.body.textContent = JSON.stringify({walked: pages.length, found});
}
walk();
</script>"""


class Links(HTMLParser):
    """What a page refers to, and the places in it that can be referred to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.parts: set[str] = set()
        self.places: set[str] = set()
        self.feed((SITE / page).read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect links, and what the page is made of."""
        found = {name: value or "" for name, value in attrs}
        self.places |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and found.get("href"):
            self.links.add(found["href"])
        if tag in {"script", "img"} and found.get("src"):
            self.parts.add(found["src"])
        if tag == "link" and found.get("rel") != "canonical":
            self.parts.add(found.get("href", ""))


@functools.cache
def links(page: str) -> Links:
    """Return those of a page."""
    return Links(page)


def dead(page: str, link: str) -> bool:
    """Return whether a link of a page leads nowhere in the site."""
    target, place = urldefrag(urljoin(BASE + page.removesuffix("index.html"), link))
    if not target.startswith(BASE):
        return False
    name = unquote(target.removeprefix(BASE).partition("?")[0])
    if not name or name.endswith("/"):
        name += "index.html"
    if not (SITE / name).is_file():
        return True
    is_page = name.endswith(".html")
    return bool(place) and is_page and unquote(place) not in links(name).places


def test_no_link_is_dead() -> None:
    """Of pages, pictures and scripts, anchors too."""
    found = [
        (page, link)
        for page in PAGES
        if page != "404.html"  # its links begin with the host
        for link in sorted(links(page).links | links(page).parts)
        if dead(page, link)
    ]
    assert not found


def test_nothing_is_loaded_from_elsewhere() -> None:
    """The site tells no other host that it is read."""
    found = [
        (page, part)
        for page in PAGES
        for part in links(page).parts
        if re.match(r"(https?:)?//", part)
    ]
    assert not found


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the site, and the page that walks it; notes what is not there."""

    pages: list[str]
    lost: list[str]

    def do_GET(self) -> None:
        """Answer."""
        if self.path != "/walk":
            super().do_GET()
            return
        body = WALKER.replace("PAGES", json.dumps(self.pages)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Say nothing."""

    def log_error(self, *_args: object) -> None:
        """Note it."""
        if self.path != "/favicon.ico":
            self.lost.append(self.path)


@contextlib.contextmanager
def served(pages: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Serve the site; give its address, and the list of what was not there."""
    lost: list[str] = []
    handler = type("Handler", (Quiet,), {"lost": lost, "pages": pages})
    make = functools.partial(handler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), make) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", lost
        server.shutdown()
        thread.join()


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_finds_no_error(scheme: str, tmp_path: Path) -> None:
    """On no page; in dark, where only colours differ, on some."""
    assert CHROMIUM is not None
    pages = [page for page in PAGES if page != "404.html"]
    if scheme == "dark":
        pages = pages[::8]
    options = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--enable-logging=stderr", "--log-level=0", "--virtual-time-budget=120000"),
        f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
        f"--user-data-dir={tmp_path}",
    ]
    with served(pages) as (url, lost):
        done = subprocess.run(
            [CHROMIUM, *options, "--dump-dom", f"{url}/walk"],
            capture_output=True,
            text=True,
            check=True,
            timeout=140,
        )
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said
    assert not lost
    answer = re.search(r"\{.*\}", done.stdout)
    assert answer is not None, done.stdout[-500:]
    assert json.loads(answer[0]) == {"walked": len(pages), "found": []}
