"""The error messages of the package, as its source says them.

``python tests/docs/messages.py`` prints what ``docs/fix-it`` lacks and what it has too
much; with ``--fix`` it renames headings to the message that is closest.
"""

import ast
import builtins
import difflib
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "aioloader"
PAGES = ROOT / "docs" / "fix-it"
HOLE = "…"


class Message(NamedTuple):
    """A place in the source that makes an error.

    Attributes:
        place: File and function, such as ``"_loader/auto.py:settle"``.
        error: Name of the class.
        text: What it says, with ``…`` for each value; empty if the source does not
            show it.
    """

    place: str
    error: str
    text: str


def messages() -> list[Message]:
    """Return the messages of all modules, by file and line."""
    collected: list[Message] = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        collected += _Collector(name, ast.parse(path.read_text())).messages
    return collected


def given() -> list[str]:
    """Return the messages that shared helpers make: checks, and imports of extras."""
    trees = {path: ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    words = {
        name: [ast.unparse(word) for word in kind.slice.elts]
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and (name := node.target.id)
        and isinstance(kind := node.value, ast.Subscript)
        and ast.unparse(kind.value) == "Literal"
        and isinstance(kind.slice, ast.Tuple)
    }
    return [
        text
        for path, tree in trees.items()
        for text in _Collector(path.name, tree, words).given
    ]


def headings() -> list[str]:
    """Return the messages that the pages have as headings, in their order."""
    text = "\n".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
    return re.findall(r"^#{3,4} `+ ?(.*?) ?`+$", text, re.MULTILINE)


class _Collector(ast.NodeVisitor):
    def __init__(
        self, name: str, tree: ast.Module, words: dict[str, list[str]] | None = None
    ) -> None:
        self._name = name
        self._words = words or {}  # of each ``Literal``
        self.given: list[str] = []
        self._scopes: list[ast.AST] = [tree]
        self._names: list[str] = []
        self.messages: list[Message] = []
        self.visit(tree)

    def _scope(self, node: Any) -> None:
        self._scopes.append(node)
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()
        self._scopes.pop()

    visit_ClassDef = _scope  # noqa: N815
    visit_FunctionDef = _scope  # noqa: N815
    visit_AsyncFunctionDef = _scope  # noqa: N815

    def visit_Call(self, node: ast.Call) -> None:
        """Collect the message of a call that makes an exception."""
        self.generic_visit(node)
        error = ast.unparse(node.func).rpartition(".")[2]
        self.given += self._helped(error, node.args)
        is_warning = error == "warn"
        if not node.args or not (is_warning or _is_error(error)):
            return
        where = f"{self._name}:{'.'.join(self._names)}"
        for text in self._texts(node.args[0]) or [""]:
            said = re.sub(r"\s+", " ", text).strip()
            said = "" if _is_bare(said) else said
            self.messages.append(Message(where, error, said))

    def _helped(self, name: str, args: list[ast.expr]) -> list[str]:
        """Return the messages that a helper makes of its arguments."""
        match name, args:
            case "imported", [_, extra, why]:
                end = f'pip install "aioloader[{self._texts(extra)[0]}]{HOLE}"'
                return [f"{text}: {end}" for text in self._texts(why)]
            case "check_is", [_, _, subject, words]:
                name = (self._texts(subject) or [HOLE])[0]
                return [f"{name} must be {kind}, got …" for kind in self._texts(words)]
            case "check_word", [_, ast.Name(id=kind), subject] if kind in self._words:
                *first, last = self._words[kind]
                shown = f"{', '.join(first)} or {last}"
                return [f"{n} must be {shown}, got …" for n in self._texts(subject)]
            case "truncated", [_, _, _, remedy]:
                begun = f"{HOLE} gave {HOLE} of {HOLE} bytes"
                return [begun + text for text in self._texts(remedy)]
        return []

    def _texts(self, node: ast.expr) -> list[str]:  # noqa: PLR0911
        """Return all texts that an expression may have, with holes; [] if unknown."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                texts = [
                    part.value if isinstance(part, ast.Constant) else HOLE
                    for part in parts
                ]
                return ["".join(map(str, texts))]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                right_texts = self._texts(right) or [HOLE]
                return [
                    text + end
                    for text in self._texts(left) or [HOLE]
                    for end in right_texts
                ]
            case ast.IfExp(body=body, orelse=orelse):
                return self._texts(body) + self._texts(orelse)
            case ast.Name(id=name):
                return self._assigned(name)
            case ast.Call(func=ast.Attribute(value=inner, attr="format")):
                return [re.sub(r"\{\w*\}", HOLE, text) for text in self._texts(inner)]
        return []

    def _assigned(self, name: str) -> list[str]:
        for scope in reversed(self._scopes):
            texts = [
                text
                for node in ast.walk(scope)
                if isinstance(node, ast.Assign)
                and any(
                    isinstance(to, ast.Name) and to.id == name for to in node.targets
                )
                for text in self._texts(node.value)
            ]
            if texts:
                return list(dict.fromkeys(texts))
        return []


def _is_error(name: str) -> bool:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type):
        return issubclass(kind, Exception) and kind is not StopIteration
    return bool(re.fullmatch(r"[A-Z]\w*Error", name))


def _is_bare(text: str) -> bool:
    return not re.search(r"[a-z]{2}", text)


# Messages that no user sees, by place.
INTERNAL = {
    "_base/extras.py:imported": "its callers say what needs which package",
    "_transport/channel.py:": "caught by both ends of the channel",
    "_workers/process/messages.py:": "the batch is pickled instead",
    "_workers/process/launcher.py:Launcher": "caught by the pool",
    "_workers/process/worker_main.py:_Server": "in a worker whose loader has ended",
    "_workers/process/portable_worker.py": "in a worker whose loader has ended",
    "datasets/_arrow/ipc.py:_blocks": "a reason in 'has a footer that cannot be read'",
    "datasets/_arrow/ipc.py:stream_batches": "a reason in 'is not an Arrow stream'",
    "datasets/_arrow/projection.py:_check_filled": "a reason in 'does not fit'",
    "datasets/lines.py:JSONDecoder": "a reason in 'the line at byte … is damaged'",
    "datasets/mds.py:_array_decoder": "a reason in 'column …'",
    "datasets/mds.py:_list": "a reason in 'the sample at byte …'",
    "datasets/mds.py:_scalar": "a reason in 'the sample at byte …'",
    "datasets/_sql/session.py:encoded": "caught where a key is looked up",
    "datasets/tar.py:_read": "a reason in 'is damaged at byte'",
    "datasets/tar.py:_Archive._read_header": "a reason there too",
    "datasets/tar.py:_Archive._read_end": "a reason there too",
    "datasets/_write/values.py:_array": "a reason in 'column … cannot be written'",
    "datasets/_write/sinks.py:StoreSink.aclose": "caught where it is raised",
}

# Places that pass the words of another message on.
PASSED_ON = {
    "_cli/pack.py:run": "says what another error says",
    "_cli/tokenize.py:run": "says what another error says",
    "_cli/bench.py:users": "says what code of the user raised",
    "_base/warnings.py:warn": "says what it is given",
    "_base/raising.py:FailedState": "says what a user's state_dict() raised",
    "datasets/_arrow/csv.py:CSVFormat._names_in": "says what its variable does",
    "datasets/_sql/format.py:SQLFormat.shards": "says what another error says",
    "datasets/sql.py:PostgresLookup._find": "carries another error",
    "datasets/_sql/session.py:SQLReader._batch": "carries another error",
    "datasets/_stores/bytes.py:StoredObject._get": "carries another error",
    "datasets/_stores/sources.py:failure_of_source": "carries another error",
    "datasets/_stores/stores.py:ObstoreStore.check_coding": "carries another error",
    "datasets/_stores/stores.py:ObstoreStore.failure": "carries another error",
    "datasets/_stores/stores.py:ObstoreStore.opened": "carries another error",
    "datasets/_stores/stores.py:WholeObject.next": "carries another error",
    "datasets/_streams/iterated.py:Iterated.__aiter__": "is the warning of iterables",
    "datasets/_streams/steps.py:Repeated": "says again what a state holds",
}

_NOT_COLLATED = "default_collate: batch must contain tensors, numpy arrays, numbers"
# Messages that are put together elsewhere: the place that raises them, the module that
# has their words, and the headings.
ELSEWHERE = {
    "_loader/state_check.py:_check": (
        "_loader/state.py",
        "the state was saved for a dataset of kind …, but this one's is …",
        "the state was saved for … samples, but the dataset has …",
        "the state was saved with batches of … samples (of all ranks together)",
        "the state was saved on … ranks, but there are …",
        "the state was saved with tail=…, but the loader has tail=…",
        "the state was saved with … readers of the iterable",
    ),
    "_pipeline/ahead_feed.py:AheadFeed._time_out": (
        "_pipeline/ahead_feed.py",
        "DataLoader timed out after … seconds",
    ),
    "_workers/process/recovery.py:Death.error": (
        "_workers/process/recovery.py",
        "DataLoader worker (pid(s) …) exited unexpectedly",
    ),
    "_workers/worker_spec.py:WorkerSpec.pickled": (
        "_workers/pickling_errors.py",
        "… cannot be pickled, so it cannot be sent to worker processes: a … object",
        "what the workers need cannot be pickled: …",
    ),
    "datasets/_checks.py:check_same": (
        "datasets/writers.py",
        "… was started with another …; write to another place, or under another name",
    ),
    "datasets/_stores/options.py:open_store": (
        "datasets/_stores/options.py",
        "the store does not know the option …: known are …",
        "the store option … must be a dict, got …",
    ),
    "_collate/collate.py:_stack_arrays": (
        "",  # torch's own
        _NOT_COLLATED,
    ),
    "_collate/collate.py:_rule_for": ("", _NOT_COLLATED),
    "a file of tokens": (
        "datasets/_tokens.py",
        (
            "… was started with another …; remove it, with its hidden '.partial' "
            "files, or write to another path"
        ),
    ),
    # Not raised there: a note, and what a function returns.
    "note": ("_workers/remote_tasks.py", "Caught … in DataLoader worker process …"),
    "stores": ("datasets/_stores/failures.py", "cannot … …: …"),
    "databases": ("datasets/_sql/address.py", "cannot … of …: …"),
    "cuts": ("datasets/tar.py", "has no index, …: write it with `aioloader index`"),
}
# A shorter heading is no stem: it would stand for anything.
SHORTEST = 12


def texts_in(module: str) -> list[str]:
    """Return all that a module may say; without a module, what torch's rules say."""
    if not module:
        from torch.utils.data._utils.collate import default_collate_err_msg_format  # noqa: PLC0415

        return [default_collate_err_msg_format.replace("{}", HOLE)]
    tree = ast.parse((SOURCE / module).read_text())
    collector = _Collector(module, tree)
    texts = [
        text
        for node in ast.walk(tree)
        if isinstance(node, (ast.Constant, ast.JoinedStr))
        for text in collector._texts(node)
    ]
    return [re.sub(r"\{\w*\}", HOLE, re.sub(r"\s+", " ", text)) for text in texts]


def is_stem(heading: str, text: str) -> bool:
    """Return whether a message begins with a heading."""
    return text == heading or (len(heading) >= SHORTEST and text.startswith(heading))


def is_internal(message: Message) -> bool:
    """Return whether no user sees a message."""
    return any(message.place.startswith(place) for place in INTERNAL)


def _is_elsewhere(place: str) -> bool:
    return place in ELSEWHERE or any(map(place.startswith, PASSED_ON))


def missing() -> list[Message]:
    """Return the messages that have no heading, and those of unknown text."""
    known = headings()
    return [
        message
        for message in messages()
        if not is_internal(message)
        and not (not message.text and _is_elsewhere(message.place))
        and not (message.text and any(is_stem(stem, message.text) for stem in known))
    ]


def stale() -> list[str]:
    """Return the headings that no message begins with."""
    texts = {*(message.text for message in messages()), *given()}
    elsewhere = {stem for _, *stems in ELSEWHERE.values() for stem in stems}
    return [
        heading
        for heading in headings()
        if heading not in elsewhere
        and not any(is_stem(heading, text) for text in texts)
    ]


def fix() -> None:
    """Rename each stale heading to the missing message whose beginning is closest."""
    lost = {message.text for message in missing()}
    for heading in stale():
        begun = {text[: len(heading) + 10]: text for text in lost}
        nearest = difflib.get_close_matches(heading, begun, 1, cutoff=0.5)
        for page in PAGES.glob("*.md") if nearest else ():
            text = page.read_text()
            new = _line(begun[nearest[0]])
            page.write_text(text.replace(_line(heading), new))


def _line(heading: str) -> str:
    return f"### `` {heading} ``\n" if "`" in heading else f"### `{heading}`\n"


def main() -> None:
    """Print the differences, or fix them."""
    if "--fix" in sys.argv:
        fix()
    for message in missing():
        print("no heading:", message.error, message.place, "|", message.text)
    for heading in stale():
        print("no message:", heading)


if __name__ == "__main__":
    main()
