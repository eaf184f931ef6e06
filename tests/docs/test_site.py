"""The built site: no dead link, nothing from other hosts, no error in a browser."""

import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import pytest

from docs.test_links import HOME, ROOT
from docs.test_questions import ROWS

SITE = ROOT / "site"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PAGES, reason="the site is not built: make docs"),
]
BASE = "https://site.invalid/"

# Shows every page in a frame, as wide as a phone and as a desktop; notes what is wider.
# A picture that loads only at the end keeps the browser waiting until then.
WALK = """
async function work(pages) {
  const faults = [];
  for (const page of pages) {
    const frame = await open(page, 390);
    if (!frame.contentDocument.querySelector("h1")) faults.push(page + ": no heading");
    for (const width of [390, 1280]) {
      frame.width = width;
      await sleep(50);
      const root = frame.contentDocument.documentElement;
      let wide = root.scrollWidth;
      for (let turn = 0; turn < 40 && wide > width; turn++) {  // it moves yet
        await sleep(50);
        wide = root.scrollWidth;
      }
      if (wide > width) faults.push(`${page}: ${wide} of ${width} wide`);
    }
    frame.remove();
  }
  return faults;
}
"""
# Searches as a reader does; returns the pages of the first results of each search.
# A search without results comes before each, so that no old results are returned.
SEARCH = """
async function work(searches) {
  const pages = [], frame = await open("/?q=loader", 1200);
  const all = (query) => [...frame.contentDocument.querySelectorAll(query)];
  const results = () => all(".md-search-result__item");
  async function search(words, isSettled) {
    const [input] = all("[data-md-component=search-query]");
    input.value = words;
    input.dispatchEvent(new KeyboardEvent("keyup"));
    for (let turn = 0; turn < 500 && !isSettled(); turn++) await sleep(20);
  }
  for (let turn = 0; turn < 500 && !results().length; turn++) await sleep(20);
  for (const words of searches) {
    await search("zqxjkv", () => !results().length);
    await search(words, () => results().length);
    await sleep(50);
    pages.push(results().map(hit => new URL(hit.querySelector("a").href).pathname));
  }
  return pages;
}
"""
DRIVER = """<!doctype html><body><img src="/slow"><script>
const sleep = duration => new Promise(resolve => setTimeout(resolve, duration));
async function open(page, width) {
  const frame = document.createElement("iframe");
  frame.height = 800; frame.width = width;
  await new Promise(resolve => {
    frame.onload = resolve; frame.src = page; document.body.append(frame);
  });
  return frame;
}
WORK
work(GIVEN).then(
  answer => fetch("/done", {method: "POST", body: JSON.stringify(answer)})
);
</script>"""


class Links(HTMLParser):
    """What a page links to or loads, and the anchors in it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.parts: set[str] = set()
        self.places: set[str] = set()
        self.feed((SITE / page).read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect links, loaded parts and anchors."""
        values = {name: value or "" for name, value in attrs}
        self.places |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and values.get("href"):
            self.links.add(values["href"])
        if tag in {"script", "img"} and values.get("src"):
            self.parts.add(values["src"])
        if tag == "link" and values.get("rel") != "canonical":
            self.parts.add(values.get("href", ""))


@functools.cache
def links(page: str) -> Links:
    return Links(page)


def dead(page: str, link: str) -> bool:
    """Return whether a link of a page leads nowhere, in the site or the repository."""
    target, place = urldefrag(urljoin(BASE + page.removesuffix("index.html"), link))
    if not target.startswith(BASE):
        at_home = HOME.sub(f"{ROOT}/", target)
        return at_home != target and not Path(at_home).exists()
    name = unquote(target.removeprefix(BASE).partition("?")[0])
    if not name or name.endswith("/"):
        name += "index.html"
    if not (SITE / name).is_file():
        return True
    is_page = name.endswith(".html")
    return bool(place) and is_page and unquote(place) not in links(name).places


def test_the_site_has_no_dead_link() -> None:
    """Pages, pictures and scripts, anchors too."""
    dead_links = [
        (page, link)
        for page in PAGES
        if page != "404.html"  # its links begin with the host
        for link in sorted(links(page).links | links(page).parts)
        if dead(page, link)
    ]
    assert not dead_links


def test_pages_load_nothing_from_other_hosts() -> None:
    """The site tells no other host that it is read."""
    foreign = [
        (page, part)
        for page in PAGES
        for part in links(page).parts
        if re.match(r"(https?:)?//", part)
    ]
    assert not foreign


class Served(http.server.ThreadingHTTPServer):
    """A server of the site, and of a page with a script that inspects it.

    Attributes:
        lost: Requested paths that do not exist.
        answer: What the script returned.
    """

    def __init__(self, work: str, given: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(_Handler, directory=SITE))
        self.driver = DRIVER.replace("WORK", work).replace("GIVEN", json.dumps(given))
        self.lost: list[str] = []
        self.answer: Any = None
        self.is_done = threading.Event()


class _Handler(http.server.SimpleHTTPRequestHandler):
    server: Served

    def do_GET(self) -> None:
        """Serve the site, or the page with the script."""
        if self.path == "/work":
            self._send(self.server.driver.encode())
        elif self.path == "/slow":
            self.server.is_done.wait(120)
            self._send(b"")
        else:
            super().do_GET()

    def do_POST(self) -> None:
        """Take what the script returned."""
        length = int(self.headers["Content-Length"])
        self.server.answer = json.loads(self.rfile.read(length))
        self._send(b"")
        self.server.is_done.set()

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Say nothing."""

    def log_error(self, *_args: object) -> None:
        """Note a missing path."""
        if self.path != "/favicon.ico":
            self.server.lost.append(self.path)


def in_browser(work: str, given: list[str], folder: Path, *, dark: bool = False) -> Any:
    """Return what a script finds in the site; the browser may log no error."""
    assert CHROMIUM is not None
    options = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--enable-logging=stderr", "--log-level=0", "--dump-dom"),
        f"--blink-settings=preferredColorScheme={int(not dark)}",
        f"--user-data-dir={folder}",
    ]
    with Served(work, given) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            done = subprocess.run(
                [CHROMIUM, *options, f"http://127.0.0.1:{server.server_port}/work"],
                capture_output=True,
                text=True,
                check=True,
                timeout=140,
            )
        finally:
            server.is_done.set()
            server.shutdown()
            thread.join()
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not server.lost
    return server.answer


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_every_page_is_shown_without_an_error(dark: bool, tmp_path: Path) -> None:
    """All pages in light colours; in dark ones every eighth."""
    pages = ["/" + page for page in PAGES if page != "404.html"]
    if dark:
        pages = pages[::8]
    assert in_browser(WALK, pages, tmp_path, dark=dark) == []


@needs_browser
def test_searches_find_the_answers_to_the_questions(tmp_path: Path) -> None:
    """Among the first five pages, apart from the page of questions."""
    hits = in_browser(SEARCH, [words for *_, words in ROWS], tmp_path)
    wanted = [link.partition("#")[0].removesuffix(".md") for _, link, _ in ROWS]
    assert len(hits) == len(wanted) >= 25
    places = [f"/{page.removesuffix('index').removesuffix('/')}/" for page in wanted]
    lost = [
        (place, results)
        for place, results in zip(places, hits, strict=True)
        if place not in [result for result in results if result != "/questions/"][:5]
    ]
    assert not lost
