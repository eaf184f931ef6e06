"""The list of shards that a writer has finished: a small JSON file next to the shards.

It names a shard before readers see the shard. So after a crash only the last one may be
missing, and is written again; no shard is written twice, and none is unknown.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from aioloader.datasets._checks import check_same
from aioloader.errors import StateMismatchError

_VERSION = 1
_OTHER = (
    "{where} was started with another {what}; write to another place, or under "
    "another name"
)


class Entry(NamedTuple):
    """One finished shard: its name, number of samples, and size in bytes."""

    file: str
    samples: int
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """The finished shards of one name, and what decides whether writing resumes.

    ``ending`` is theirs, as in ``"tar"``; ``metadata`` is the user's description of the
    samples' origin; ``schema`` is that of tables, as text.
    """

    name: str
    ending: str
    metadata: Mapping[str, Any]
    schema: str = ""
    shards: tuple[Entry, ...] = ()

    @property
    def file(self) -> str:
        return f"{self.name}-shards.json"

    @property
    def next_shard(self) -> str:
        """Name of the shard after the finished ones."""
        return f"{self.name}-{len(self.shards):06d}.{self.ending}"

    def and_then(self, samples: int, size: int, schema: str) -> "Manifest":
        """Return the manifest with one more shard."""
        entry = Entry(self.next_shard, samples, size)
        return replace(self, shards=(*self.shards, entry), schema=schema)

    def dump(self) -> bytes:
        content = {
            "version": _VERSION,
            "format": self.ending,
            "metadata": self.metadata,
            "schema": self.schema,
            "shards": [entry._asdict() for entry in self.shards],
        }
        return (json.dumps(content, indent=1) + "\n").encode()

    def resumed(
        self, text: bytes | None, there: Mapping[str, int], label: str
    ) -> "Manifest":
        """Return the manifest of an earlier writer, or raise a StateMismatchError.

        Given are the contents of the manifest file, if it exists, the sizes of all
        files of the folder by name, and the folder, for errors.
        """
        where = f"{label!r} ({self.file})"
        found = self if text is None else self._loaded(text, where)
        shards = found.shards
        if shards and shards[-1].file not in there:
            shards = shards[:-1]  # started, not finished
        for entry in shards:
            size = there.get(entry.file)
            if size != entry.bytes:
                state = "is gone" if size is None else f"has {size:,} bytes"
                raise StateMismatchError(
                    f"{where} has {entry.file!r} with {entry.bytes:,} bytes, but that "
                    f"{state}; write to another place, or under another name",
                    expected=entry.bytes,
                    found=size,
                )
        pattern = re.compile(rf"{re.escape(self.name)}-\d{{6,}}\.{self.ending}")
        others = {*filter(pattern.fullmatch, there)} - {one.file for one in shards}
        if others:
            raise StateMismatchError(
                f"{where} does not name {min(others)!r}, which is there: readers would "
                f"take both for one dataset; write to another place, or under another "
                f"name",
                expected=len(shards),
                found=sorted(others),
            )
        return replace(found, shards=shards)

    def _loaded(self, text: bytes, where: str) -> "Manifest":
        try:
            content = json.loads(text)
            version, schema = content["version"], content["schema"]
            shards = tuple(Entry(**entry) for entry in content["shards"])
            theirs = {name: content[name] for name in ("format", "metadata")}
        except (ValueError, TypeError, KeyError) as exc:
            raise StateMismatchError(
                f"{where} is not a writer's list of shards: {exc!r}; write to another "
                f"place, or under another name"
            ) from exc
        if version != _VERSION:
            raise StateMismatchError(
                f"{where} is of version {version}, and this is {_VERSION}; write to "
                "another place",
                expected=_VERSION,
                found=version,
            )
        check_same(theirs, json.loads(self.dump()), _OTHER, where)
        return replace(self, shards=shards, schema=schema)
