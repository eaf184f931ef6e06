"""Write the reference, ``docs/reference/*.md``, from the package's docstrings.

The pages are plain Markdown, for GitHub and for the site. A comment in a page lists
names; what follows it, up to ``<!-- end -->``, is generated::

    <!-- reference
    aioloader.DataLoader: stats report
    aioloader.Retry
    -->

Classes are shown with their public methods; after a colon come inherited ones. Those
after a module are its members. The package's source is read, not imported.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
PART = re.compile(r"(<!-- reference\n(.*?)\n-->).*?<!-- end -->", re.DOTALL)
WIDTH = 80  # of a signature on one line


class Reference:
    """The package, as its source describes it, and where the pages show its classes."""

    def __init__(self) -> None:
        self.package = griffe.load(
            "aioloader",
            search_paths=[ROOT / "src"],
            docstring_parser="google",
            docstring_options={"returns_multiple_items": False, "warnings": False},
            resolve_aliases=True,
        )
        self.places = {
            self.find(path).canonical_path: f"{page.name}#{path}"
            for page in PAGES
            for _, names in PART.findall(page.read_text())
            for path in re.findall(r"^[\w.]+", names, re.MULTILINE)
        }

    def find(self, path: str) -> Any:
        """Return what has a public name."""
        return self.package[path.removeprefix("aioloader.")]

    def updated(self, text: str) -> str:
        """Return a page with its generated parts as the package is now."""

        def written(part: re.Match[str]) -> str:
            by_hand = PART.sub("", text[: part.start()])
            level = 3 if "\n## " in by_hand else 2
            blocks = [
                block
                for line in part[2].splitlines()
                for block in self.listed(*line.split(":"), level=level)
            ]
            return "\n\n".join([part[1], *blocks, "<!-- end -->"])

        return PART.sub(written, text)

    def listed(self, path: str, more: str = "", *, level: int) -> Iterator[str]:
        """Yield the blocks of one line of a comment."""
        found = self.find(path)
        names = more.split()
        prefix = ""
        if found.is_module:
            yield from described(found)
            names = names or own_members(found)
        else:
            yield from self.entry(found, path, path.rpartition(".")[2], level)
        if found.is_class:
            names = own_members(found) + names
            prefix = f"{found.name}."
            level += 1
        for name in names:
            member = found.all_members[name]
            yield from self.entry(member, f"{path}.{name}", prefix + name, level)

    def entry(self, found: Any, path: str, name: str, level: int) -> Iterator[str]:
        """Yield heading, signature, base classes and docstring."""
        yield f'{"#" * level} <a id="{path}"></a>`{name}`'
        yield f"```py\n{signature(found)}\n```"
        bases = [
            f"[`{base.canonical_name}`]({self.places[base.canonical_path]})"
            for base in (found.bases if found.is_class else [])
            if getattr(base, "canonical_path", "") in self.places
        ]
        if bases:
            yield f"Base: {', '.join(bases)}."
        yield from described(found)


def own_members(found: Any) -> list[str]:
    """Return the public members with docstrings, in the order of the source."""
    return [
        name
        for name, member in found.members.items()
        if not name.startswith("_") and member.has_docstring
    ]


def signature(found: Any) -> str:
    """Return how it is called; the type of an attribute."""
    if found.is_attribute:
        return f"{found.name}: {found.annotation}"
    hidden = re.compile("self$|cls$|_")
    parameters = [one for one in found.parameters if not hidden.match(one.name)]
    kind = "" if found.is_class else "def "
    if "async" in found.labels:
        kind = "async def "
    for label in ("classmethod", "staticmethod"):
        if label in found.labels:
            kind = f"@{label}\n{kind}"
    result = f" -> {found.returns}" if found.is_function and found.returns else ""
    shown = list(arguments(parameters))
    line = f"{found.name}({', '.join(shown)}){result}"
    if len(line) > WIDTH:
        rows = "".join(f"    {one},\n" for one in shown)
        line = f"{found.name}(\n{rows}){result}"
    return kind + line.replace("'", '"')


def arguments(parameters: list[Any]) -> Iterator[str]:
    """Yield parameters as in source, with ``/`` and ``*`` between their kinds."""
    kinds = griffe.ParameterKind
    before = None
    for one in parameters:
        if before is kinds.positional_only and one.kind is not before:
            yield "/"
        if one.kind is kinds.keyword_only and before not in {
            kinds.keyword_only,
            kinds.var_positional,
        }:
            yield "*"
        before = one.kind
        stars = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(one.kind, "")
        shown = stars + one.name
        if one.annotation is not None:
            shown += f": {one.annotation}"
        if one.default is not None and not stars:
            shown += f" = {one.default}" if one.annotation else f"={one.default}"
        yield shown
    if before is kinds.positional_only:
        yield "/"


def described(found: Any) -> Iterator[str]:
    """Yield the sections of a docstring as Markdown."""
    for section in found.docstring.parsed if found.docstring else []:
        value = section.value
        if section.kind is griffe.DocstringSectionKind.text:
            yield re.sub(r"::$", ":", value, flags=re.MULTILINE)
        elif section.kind is griffe.DocstringSectionKind.admonition:
            yield f"**{section.title}:**"
            is_code = value.contents.startswith(">>>")
            yield f"```py\n{value.contents}\n```" if is_code else value.contents
        elif section.kind is griffe.DocstringSectionKind.returns:
            yield f"**Returns:** {value[0].description}"
        else:
            yield f"**{section.kind.value.capitalize()}:**"
            yield "\n".join(map(item, value))


def item(one: Any) -> str:
    """Return one parameter, attribute or exception as an item of a list."""
    name = getattr(one, "name", "") or one.annotation
    text = one.description.replace("\n", "\n    ")
    return f"- **`{name}`**: {text}"


def main() -> None:
    """Write all pages."""
    reference = Reference()
    for page in PAGES:
        page.write_text(reference.updated(page.read_text()))


if __name__ == "__main__":
    main()
