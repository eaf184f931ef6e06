"""Split addresses of shards into store and key, match patterns, and label shards.

``spell`` makes an address from a listed key; ``split`` recovers the key. Patterns
follow ``glob``: ``*``, ``?`` and ``[...]`` match within one segment, but not a leading
dot. The segment ``**`` matches any number of segments. An address that contains a
secret (a user, a password or a query) is a ``SecretURL``.
"""

import contextlib
import errno
import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias
from urllib.parse import quote, unquote

from aioloader.datasets._stores.failures import file_failure
from aioloader.datasets._stores.redact import redact_key, redact_url, seal_url

# A path or URL; a ``SecretURL`` if it contains a secret.
Address: TypeAlias = str

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# URL paths that change when decoded and re-encoded, or that obstore rejects as keys.
_NOT_A_KEY = re.compile(r"%2F|%5C|%0|%1|//|(^|/)(\.|%2E){1,2}(/|$)|/$", re.IGNORECASE)
# Hosts whose URLs have the bucket as the first segment of the path.
_BUCKET_FIRST = re.compile(
    r"s3[.-](.*\.)?amazonaws\.com|.*\.r2\.cloudflarestorage\.com|"
    r".*\.(blob|dfs)\.(core\.windows\.net|fabric\.microsoft\.com)"
)
_ENCODED_SIGN = re.compile(r"%(2A|3F|5B)", re.IGNORECASE)
_SIGN = re.compile(r"\[(?>!?\]?)[^\]]*\]|\*+|.", re.DOTALL)
# A regular expression for any number of folders that are not hidden.
_FOLDERS = r"(?:(?!\.)[^/]+/)*"
# The errno values for paths that do not exist and for dangling links.
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
_SPECIAL = re.compile(r"[^A-Za-z0-9/._~=+-]")


def sealed(addresses: Any) -> list[Address]:
    """Check a user's addresses or patterns; return them with secrets sealed."""
    if isinstance(addresses, (str, os.PathLike)):
        addresses = [addresses]
    if isinstance(addresses, bytes) or not isinstance(addresses, Iterable):
        raise TypeError(
            "addresses must be a path or URL, or an iterable of them, got "
            f"{type(addresses).__name__}"
        )
    made: list[Address] = []
    for number, address in enumerate(addresses):
        if not isinstance(address, (str, os.PathLike)):
            raise TypeError(
                f"addresses must be paths or URLs, but number {number} is of type "
                f"{type(address).__name__}"
            )
        plain = os.fsdecode(address)
        if plain.startswith("pipe:"):
            raise ValueError(
                "no commands are run for addresses: give the URL that the command of "
                f"number {number} reads (s3://, gs://, https://, hf://), or a path"
            )
        made.append(seal_url(plain) if "://" in plain else plain)
    return made


def is_local(address: Address) -> bool:
    """Return whether an address is a path or a ``file://`` URL."""
    return not _SCHEME.match(address) or address[:7].lower() == "file://"


def path_of(address: str) -> str:
    if not _SCHEME.match(address):
        return address
    host, slash, path = address[len("file://") :].partition("/")
    if host not in {"", "localhost"}:
        raise ValueError(
            f"{str(address)!r} names a host, {host!r}: a file URL has three slashes, "
            f"as in 'file:///{host}{slash}{path}'"
        )
    return "/" + unquote(path)


def split(address: Address) -> tuple[Address, str]:
    """Return the URL of an address's store, and the decoded key in that store.

    An HTTP URL with a query, or whose path is not a valid key, is not split: the URL
    itself is the store, and the key is empty.
    """
    root, path, is_whole = _split(address)
    if is_whole:
        return seal_url(address.partition("#")[0]), ""
    return seal_url(root), unquote(path)


def spell(root: Address, key: str) -> Address:
    """Return the address of a listed key; ``split`` is the inverse.

    But ``split`` keeps some HTTP URLs whole, such as those of keys with a backslash.
    """
    return seal_url(f"{root}/{quote(key) if _SPECIAL.search(key) else key}")


def _split(url: str) -> tuple[str, str, bool]:
    """Return the store's URL, the encoded path, and whether the URL stays whole."""
    scheme, _, rest = url.partition("://")
    is_web, query = scheme.lower() in {"http", "https"}, ""
    if is_web:
        rest, _, query = rest.partition("#")[0].partition("?")
    host, _, path = rest.partition("/")
    if is_web and not query and _BUCKET_FIRST.fullmatch(host.rpartition("@")[2]):
        bucket, _, path = path.partition("/")
        host = f"{host}/{bucket}"
    is_whole = bool(query) or (is_web and bool(_NOT_A_KEY.search(path)))
    return f"{scheme}://{host}", path, is_whole


def name_of(address: Address) -> str:
    """Return a shard's decoded path or URL, without user, password and HTTP query."""
    if "://" not in address:
        return address
    if is_local(address):
        return path_of(address)
    root, path, _ = _split(address)
    return f"{redact_url(root)}/{unquote(path)}"


def sibling(address: Address, rename: Callable[[str], str]) -> Address:
    """Apply ``rename`` to an address, except to an HTTP URL's query and fragment."""
    is_web = address[:4].lower() == "http" and _SCHEME.match(address)
    length = len(re.split("[?#]" if is_web else r"\Z", address, maxsplit=1)[0])
    return seal_url(rename(address[:length]) + address[length:])


def shown_address(address: Address) -> str:
    """Return the repr of an address or pattern, with secrets removed."""
    return repr(str(address) if is_local(address) else redact_url(address))


def shown_addresses(addresses: list[Address]) -> str:
    if len(addresses) == 1:
        return shown_address(addresses[0])
    return f"<{len(addresses):,} addresses>"


def braces(pattern: Address) -> Iterator[Address]:
    r"""Expand ``{a,b}`` and ``{000..127}``, as bash does; ``\{`` is a literal brace."""
    if "{" not in pattern:
        return iter([pattern])
    from braceexpand import braceexpand  # noqa: PLC0415  (only if needed)

    try:
        return map(seal_url, [*braceexpand(pattern)])
    except ValueError:  # an unmatched brace is a literal character
        return iter([pattern])


def pattern_of(address: Address) -> tuple[Address, str] | None:
    """Return the store's URL and a pattern for its keys; None for a plain address.

    An HTTP URL is a pattern only if its path contains ``*``.
    """
    root, path, _ = _split(address)
    is_web = root[:4].lower() == "http"
    if not has_signs(path) or (is_web and "*" not in path):
        return None
    if "?" in address if is_web else redact_key(path) != path:
        raise ValueError(
            f"{shown_address(address)} has a query next to a pattern, or in a URL that "
            "is not HTTP: list signed URLs one by one, as https://..., and write a ? "
            "in a name as %3F"
        )
    return seal_url(root), unquote(_ENCODED_SIGN.sub(_bracketed, path))


def local_pattern(address: str) -> str:
    if not _SCHEME.match(address):
        return address
    return path_of(_ENCODED_SIGN.sub(_bracketed, address))


def _bracketed(sign: "re.Match[str]") -> str:
    """Return a pattern for the literal ``*``, ``?`` or ``[`` that ``sign`` encodes."""
    return f"[{unquote(sign[0])}]"


def has_signs(pattern: str) -> bool:
    return any(sign in pattern for sign in "*?[")


def folder_of(pattern: str) -> str:
    """Return the folder that contains all matches, without a trailing slash."""
    return re.split(r"[*?[]", pattern, maxsplit=1)[0].rpartition("/")[0]


def globbed(pattern: str, folder: str) -> tuple[list[str], int]:
    """Return matching files below ``folder``, sorted, and how many folders match."""
    try:
        # A dict, because a pattern with two ** segments yields some paths twice.
        matches = dict(_walk(pattern, folder))
    except OSError as error:
        raise file_failure(error.filename, error) from error
    matches.pop("", None)  # the pattern ** yields the folder itself
    # Dangling links count as files, so that reading them raises an error.
    files = [path for path, is_folder in matches.items() if not is_folder]
    return sorted(files), len(matches) - len(files)


def _walk(pattern: str, folder: str) -> Iterator[tuple[str, bool]]:
    """Yield each match and whether it is a folder; raise if a folder is unreadable."""
    above, name = os.path.split(pattern) if has_signs(pattern) else ("", pattern)
    parents: Iterable[str] = [above]
    if has_signs(above):
        parents = (path for path, is_folder in _walk(above, folder) if is_folder)
    is_deep, is_plain = name == "**", not has_signs(name)
    matches = re.compile(_segment("*" if is_deep else name)).fullmatch
    for parent in parents:
        start = os.path.join(parent, "")  # noqa: PTH118
        root = os.path.join(folder, start)  # noqa: PTH118
        if is_plain:
            path = os.path.join(root, name)  # noqa: PTH118
            with _ignore_absent():
                os.lstat(path)
                yield start + name, os.path.isdir(path)  # noqa: PTH112
            continue
        if is_deep and os.path.isdir(root or "."):  # noqa: PTH112
            yield start, True
        below = [""]
        for inner in below:  # the loop body appends to it
            here = start + inner
            with _ignore_absent(), os.scandir(root + inner or ".") as entries:
                for entry in entries:
                    if matches(child := entry.name):
                        is_folder = _is_folder(entry)
                        yield here + child, is_folder
                        if is_deep and is_folder:
                            below.append(f"{inner}{child}/")


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return False


@contextlib.contextmanager
def _ignore_absent() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _ABSENT:
            raise


def matching(keys: Iterable[str], pattern: str) -> list[str]:
    *folders, last = pattern.split("/")
    parts: list[str] = []
    for folder in folders:
        if folder != "**":
            parts.append(_segment(folder) + "/")
        elif parts[-1:] != [_FOLDERS]:
            parts.append(_FOLDERS)
    if last == "**":
        parts.append(_FOLDERS)
    matches = re.compile("".join([*parts, _segment(last)])).fullmatch
    return [key for key in keys if matches(key)]


def _segment(pattern: str) -> str:
    """Return a segment's regular expression, which cannot backtrack exponentially."""
    if not has_signs(pattern):
        return re.escape(pattern)
    chunks = [""]
    for sign in _SIGN.findall(pattern):
        if sign.startswith("*"):
            chunks.append("")
        elif len(sign) > 1:  # a set [...]; [:-2] drops the end-of-string anchor
            chunks[-1] += f"(?!/){fnmatch.translate(sign)[:-2]}"
        else:
            chunks[-1] += "[^/]" if sign == "?" else re.escape(sign)
    first, *rest = chunks
    guard = "" if pattern.startswith(".") else r"(?!\.)"
    inner = "".join(f"(?>[^/]*?{chunk})" for chunk in rest[:-1] if chunk)
    return guard + first + inner + (f"[^/]*{rest[-1]}" if rest else "")
