"""The list of shards that a writer has finished: a small JSON file next to the shards.

It names a shard before readers see the shard. So after a crash only the last one may be
missing, and is written again; no shard is written twice, and none is unknown.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aioloader.errors import StateMismatchError

_VERSION = 1


@dataclass(frozen=True)
class Entry:
    """One finished shard.

    Attributes:
        file: Its name.
        samples: Number of samples.
        bytes: Its size.
    """

    file: str
    samples: int
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """The finished shards of one name.

    Attributes:
        name: Prefix of the shards' names.
        ending: Their ending, as in ``"tar"``.
        metadata: The user's description of the samples' origin.
        schema: The schema of tables, as text.
        shards: The shards, in their order.
    """

    name: str
    ending: str
    metadata: Mapping[str, Any]
    schema: str = ""
    shards: list[Entry] = field(default_factory=list)

    @property
    def file(self) -> str:
        """Name of the manifest file."""
        return f"{self.name}-shards.json"

    @property
    def num_samples(self) -> int:
        """Number of samples in all shards."""
        return sum(entry.samples for entry in self.shards)

    def shard(self, number: int) -> str:
        """Return the name of a shard."""
        return f"{self.name}-{number:06d}.{self.ending}"

    def and_then(self, samples: int, size: int, schema: str) -> "Manifest":
        """Return the manifest with one more shard."""
        entry = Entry(self.shard(len(self.shards)), samples, size)
        return replace(self, shards=[*self.shards, entry], schema=schema)

    def dump(self) -> bytes:
        """Return it as JSON."""
        content = {
            "version": _VERSION,
            "format": self.ending,
            "metadata": self.metadata,
            "schema": self.schema,
            "shards": [vars(entry) for entry in self.shards],
        }
        return (json.dumps(content, indent=1) + "\n").encode()

    def resumed(
        self, text: bytes | None, there: Mapping[str, int], label: str
    ) -> "Manifest":
        """Return the manifest of an earlier writer.

        Args:
            text: Contents of the manifest file, if it exists.
            there: Names and sizes of all files in the folder.
            label: The folder, for errors.

        Raises:
            StateMismatchError: If there are shards that it does not name, or they were
                made with other settings.
        """
        where = f"{label!r} ({self.file})"
        found = self if text is None else self._loaded(text, where)
        shards = list(found.shards)
        if shards and shards[-1].file not in there:
            shards.pop()  # started, not finished
        for entry in shards:
            if there.get(entry.file) != entry.bytes:
                size = there.get(entry.file)
                state = "is gone" if size is None else f"has {size:,} bytes"
                raise StateMismatchError(
                    f"{where} has {entry.file!r} with {entry.bytes:,} bytes, but that "
                    f"{state}; write to another place, or under another name",
                    expected=entry.bytes,
                    found=size,
                )
        pattern = re.compile(rf"{re.escape(self.name)}-\d{{6,}}\.{self.ending}")
        others = {file for file in there if pattern.fullmatch(file)}
        others -= {entry.file for entry in shards}
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
            version = content["version"]
            shards = [Entry(**entry) for entry in content["shards"]]
            found = content["format"], content["metadata"], content["schema"]
        except (ValueError, TypeError, KeyError) as exc:
            raise StateMismatchError(
                f"{where} is not a writer's list of shards: {exc!r}; write to "
                f"another place, or under another name"
            ) from exc
        if version != _VERSION:
            raise StateMismatchError(
                f"{where} is of version {version}, and this is {_VERSION}",
                expected=_VERSION,
                found=version,
            )
        mine = json.loads(json.dumps([self.ending, dict(self.metadata)]))
        schemas = {self.schema, found[2]} - {""}
        for what, old, new in (
            ("format", found[0], mine[0]),
            ("metadata", found[1], mine[1]),
            ("schema", min(schemas, default=""), max(schemas, default="")),
        ):
            if old != new:
                raise StateMismatchError(
                    f"{where} was started with another {what}; write to another place, "
                    f"or under another name",
                    expected=old,
                    found=new,
                )
        return replace(self, shards=shards, schema=max(schemas, default=""))
