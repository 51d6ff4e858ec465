"""Parses YAML text into a tree of values, each with its place in the text.

Scalars follow the core schema of YAML 1.2, not of 1.1: `on` and `no` are words, `3e-4` is a number, `12:30` is text.
The tree is built from the parser's events, not from composed nodes, because only an event shows whether a tag was
written or guessed. `${VAR}` is filled in inside single scalars, after the structure is known, so the value of a
variable can never add a key.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import yaml

from cloudtrain.entrypoints.rank import variables

from ..errors import Fault, Place

KeyPath = tuple[str | int, ...]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C parser, if built, is ten times faster
_MAX_DEPTH = 50
_MAX_VALUES = 50_000  # with every alias expanded: a few lines of aliases can expand to billions of values

_LONGEST_EXCERPT = 500  # columns
_EXCERPT_TAIL = 160  # columns shown after the place

# Source: YAML 1.2.2, section 7.4.2: a plain or quoted key ends within 1,024 characters.
_LONG_KEY = re.compile(r"(?:^|[{,]) *([^\s:{},#][^:{},\n]{1024,}):(?:\s|$)", re.MULTILINE)
_LINE_END = re.compile("\r\n|[\r\n\x85\u2028\u2029]")  # YAML's line ends, to count lines as the parser does
_NULLS = {"", "~", "null", "Null", "NULL"}
_TRUE = {"true", "True", "TRUE"}
_FALSE = {"false", "False", "FALSE"}
FALSE_OF_YAML_1_1 = {"no", "No", "NO", "off", "Off", "OFF"}  # text in YAML 1.2
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_LONGEST_INT = 100  # digits; a longer integer stays text (Python itself refuses more than 4,300 digits)
_NOT_TEXT = re.compile("[\x00\ud800-\udfff]")  # double-quoted escapes and environment variables can still add these
_CONTROL = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

# The variables that stay for the node, by key, after `${`.
_JOBS = re.compile(r"CLOUDTRAIN_\w*\}", re.ASCII)
_RANKS = re.compile(rf"(?:CLOUDTRAIN_\w*|{'|'.join(variables.OF_TORCHRUN)})\}}", re.ASCII)
_OF_NODE = {"args": _RANKS, "resume_args": _RANKS, "env": _JOBS, "setup": _JOBS}
_REFERENCE = re.compile(r"\$\$\{|\$\{([^}]*)\}?")
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)
_OF_AZURE = re.compile(r"\$\{\{\s*(inputs|outputs)\.(\w+)")  # Azure ML fills these in
SECRET_NAME = re.compile(r"key|token|secret|passw|credential|auth|private|webhook|_url$", re.IGNORECASE)

# A pattern in the parser's message (libyaml's and PyYAML's words differ a little) -> the problem, the fix.
_SAID: tuple[tuple[str, str, str], ...] = (
    ("'\\\\t'|violates indentation", "a tab cannot indent YAML", "use spaces"),
    ("mapping values are not allowed", "a `:` where none can stand", ""),  # _colon_hint looks at the lines
    ("while scanning a quoted scalar", "the quote that opens here is not closed", "close it, or leave both quotes out"),
    ("expected ',' or '}'", "the `{` that opens here is not closed, or a comma is missing", "every `{` needs its `}`"),
    ("expected ',' or ']'", "the `[` that opens here is not closed, or a comma is missing", "every `[` needs its `]`"),
    ("expected ':'", "a key without its `:`", "write `key: value`, with a space after the colon"),
    (
        "parsing a block collection",
        "this line fits neither the mapping nor the list around it",
        "indent alike what belongs together",
    ),
    ("block sequence entries", "a list cannot begin here", "put the `-` on a line of its own, below its key"),
    ("expected key|<block end>", "this line fits no mapping around it", "indent the keys of one mapping alike"),
    ("cannot start any token", "this character cannot begin a value", "put quotes around the value"),
    (
        "anchor|alias",
        "this `&name` or `*name` is not well formed",
        "put quotes around text that begins with `&` or `*`",
    ),
    ("escape", "this backslash means nothing inside double quotes", "use single quotes, or double the backslash"),
    ("tag", "text that begins with `!` needs quotes", ""),
    ("block scalar", "this `|` or `>` block is not well formed", "indent its lines below their key"),
    ("document start", "this line fits nothing above it", "indent it as the keys around it, or quote what is above"),
    ("directive", "text that begins with `%` needs quotes", ""),
)


@dataclass(frozen=True)
class YamlNode:
    """A value and the place where the value begins. `value` is a scalar, a tuple of nodes, or a dict of nodes."""

    value: Any
    place: Place
    key: Place | None = None  # of a mapping's member: the place of its key
    text: str = ""  # the scalar as written: `1.10` is the number 1.1, but `1.10` as the value of a tag
    plain: bool = False
    shown: str = ""  # the text for messages in place of a value from a secret variable
    size: int = 1
    depth: int = 1
    broken: bool = False  # a fault of the value is already reported: do not report more

    def data(self) -> Any:
        """Return the value as plain Python: dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: member.data() for key, member in self.value.items()}
        if isinstance(self.value, tuple):
            return [item.data() for item in self.value]
        return self.value


class ParsedYaml(NamedTuple):
    """The root (None if the text is empty or not YAML) and the faults found."""

    root: YamlNode | None
    faults: tuple[Fault, ...]


def parse(text: str, file: str, environ: Mapping[str, str], fixed: Place | None = None) -> ParsedYaml:
    """Return the tree of the only document in `text`. A syntax fault ends the reading, other faults do not.

    `fixed` is the place of every value if the text is not from a file but an override on the command line.
    """
    builder = _Builder(_SourceText(text, file, fixed), environ)
    if control := _CONTROL.search(text):
        place = builder.source.at(control.start())
        hint = "save the file as plain UTF-8 text"
        return ParsedYaml(None, (Fault("a character that YAML does not allow", place=place, hint=hint),))
    try:
        root = builder.document(list(yaml.parse(text, Loader=_LOADER)))
    except yaml.YAMLError as exc:
        return ParsedYaml(None, (_long_key(exc, builder.source) or _human_fault(exc, builder.source),))
    except _StopReadingError as exc:
        return ParsedYaml(None, (exc.fault,))
    return ParsedYaml(root, tuple(builder.faults))


def from_data(data: Any, place: Place) -> YamlNode:
    """Return the tree of plain data from storage or Python: all values at `place`, variables not filled in."""
    if isinstance(data, Mapping):
        return YamlNode({str(key): replace(from_data(value, place), key=place) for key, value in data.items()}, place)
    if isinstance(data, list | tuple):
        return YamlNode(tuple(from_data(item, place) for item in data), place)
    value = os.fspath(data) if isinstance(data, os.PathLike) else data
    text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return YamlNode(value, place, text=text, plain=not isinstance(value, str))


def scalar(text: str) -> Any:
    """Return the value of an unquoted YAML scalar. Raises ValueError for infinity and NaN."""
    if text in _NULLS:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _INT.fullmatch(text):
        if len(text) > _LONGEST_INT:
            return text
        return int(text) if text[:2] not in {"0o", "0x"} else int(text, 0)
    if _NOT_FINITE.fullmatch(text):
        raise ValueError
    if _FLOAT.fullmatch(text):
        number = float(text)
        if number in {float("inf"), float("-inf")}:
            raise ValueError
        return number
    return text


def find(root: YamlNode, path: KeyPath) -> YamlNode | None:
    """Return the node at a path such as `("notify", 0, "slack")`, None if the tree has no such node."""
    node = root
    for step in path:
        if isinstance(node.value, dict) and str(step) in node.value:
            node = node.value[str(step)]
        elif isinstance(node.value, tuple) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
        else:
            return None
    return node


def given(root: YamlNode, *path: str | int) -> YamlNode | None:
    """Return the node at the path; None if the key is missing or has no value."""
    node = find(root, path)
    return node if node is not None and (node.value is not None or node.broken) else None


def text_at(root: YamlNode, *path: str) -> str:
    """Return the text at the path; an empty text if the key is missing or has another type."""
    node = given(root, *path)
    return node.value if node and isinstance(node.value, str) else ""


def whole_at(root: YamlNode, *path: str) -> int:
    """Return the whole number at the path; 0 if the key is missing or has another type, such as `true`."""
    node = given(root, *path)
    return node.value if node and isinstance(node.value, int) and not isinstance(node.value, bool) else 0


def scalars(node: YamlNode | None, path: KeyPath) -> Iterator[tuple[KeyPath, YamlNode]]:
    """Yield each scalar of the node at the path, with the path of the scalar."""
    if node is None or not isinstance(node.value, dict | tuple):
        yield from [] if node is None else [(path, node)]
        return
    for step in node.value if isinstance(node.value, dict) else range(len(node.value)):
        yield from scalars(find(node, (step,)), (*path, step))


def key_place(root: YamlNode, path: KeyPath) -> Place | None:
    """Return the place of the last key of the path; for an item of a list, the place of the value."""
    node = find(root, path)
    return (node.key or node.place) if node is not None else None


def _long_key(exc: yaml.YAMLError, source: _SourceText) -> Fault | None:
    """Return the fault of a too long key on the line of the parser's error: the parser names a misleading reason."""
    for mark in (getattr(exc, "context_mark", None), getattr(exc, "problem_mark", None)):
        ends = [] if mark is None else [*source.starts, len(source.text)][mark.line :][:2]
        if len(ends) == 2 and (found := _LONG_KEY.search(source.text, *ends)):
            place = source.at(found.start(1))
            return Fault("a key may have at most 1,024 characters", place=place, hint="shorten the key")
    return None


def _human_fault(exc: yaml.YAMLError, source: _SourceText) -> Fault:
    """Return the parser's error as a fault, for readers without knowledge of the YAML grammar."""
    if not isinstance(exc, yaml.MarkedYAMLError):
        return Fault(f"not YAML: {exc}")
    said = f"{exc.context or ''}: {exc.problem or ''}"
    known = ((message, hint) for part, message, hint in _SAID if re.search(part, said))
    message, hint = next(known, (f"not YAML: {exc.problem or 'the parser gives no reason'}", ""))
    places = [source.place(mark.line, mark.column) for mark in (exc.problem_mark, exc.context_mark) if mark is not None]
    if not places:
        return Fault(message, hint=hint)
    if "\t" in places[0].excerpt[: places[0].column]:
        return Fault("a tab cannot indent YAML", place=places[0], hint="use spaces")
    if "a `:` where" in message:
        above = source.place(places[0].line - 2, 0).excerpt if places[0].line > 1 else ""
        return Fault(message, place=places[0], hint=_colon_hint(places[0], above))
    if "opens here" not in message:
        return Fault(message, place=places[0], hint=hint)
    variable = places[0].excerpt.find("${")
    if variable >= 0 and "comma" in message:
        hint = 'as in `"${NAME}"`, or write the mapping or list over several lines'
        place = source.place(places[0].line - 1, variable)
        return Fault("a variable inside `{ }` or `[ ]` needs quotes", place=place, hint=hint)
    end, opener = places[0], places[-1]
    return Fault(message, place=opener, hint=hint, also=(end,) if end.line != opener.line and end.excerpt else ())


def _colon_hint(place: Place, above: str) -> str:
    """Return the hint for the likely reason of a misplaced `:`: unquoted text, a missing `:` above, or the indent."""
    if ": " in place.excerpt[: place.column - 1]:
        return "put quotes around text that holds `: `"
    if above.strip() and ":" not in above:
        return "the line above has no `:`"
    return "indent the keys of one mapping alike"


class _StopReadingError(Exception):
    """Ends the reading of the text; `fault` is then the only fault to report."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


@dataclass(frozen=True)
class _SourceText:
    text: str
    file: str
    fixed: Place | None
    starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        starts = [0, *(match.end() for match in _LINE_END.finditer(self.text))]
        object.__setattr__(self, "starts", starts)

    def place(self, line: int, column: int) -> Place:
        """Return the place of a parser's mark; the mark counts from 0."""
        if self.fixed is not None:
            return self.fixed
        line = min(line, len(self.starts) - 1)
        start = self.starts[line]
        end = self.starts[line + 1] if line + 1 < len(self.starts) else len(self.text)
        if column > _LONGEST_EXCERPT:
            return Place(self.file, line + 1, column + 1, "")  # a line too long to show
        excerpt = self.text[start : min(end, start + column + _EXCERPT_TAIL)].rstrip("\r\n\x85\u2028\u2029")
        return Place(self.file, line + 1, column + 1, _CONTROL.sub("\N{REPLACEMENT CHARACTER}", excerpt))

    def at(self, offset: int) -> Place:
        """Return the place of the character at the offset in the text."""
        line = bisect_right(self.starts, offset) - 1
        return self.place(line, offset - self.starts[line])


class _Builder:
    """Turns the parser's events into nodes. The depth has a limit, so nesting cannot exhaust Python's call stack."""

    def __init__(self, source: _SourceText, environ: Mapping[str, str]) -> None:
        self.source = source
        self.environ = environ
        self.faults: list[Fault] = []
        self.anchors: dict[str, YamlNode] = {}
        self.events: Iterator[Any] = iter(())
        self.path: list[str] = []  # the keys and indexes from the root to the present value

    def document(self, events: Sequence[Any]) -> YamlNode | None:
        """Return the root of the only document."""
        root: YamlNode | None = None
        self.events = self._counted(events)
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent) and root is not None:
                self._stop("a second document begins here", event, "one file describes one job: remove the `---`")
            if isinstance(event, yaml.NodeEvent):
                root = self._node(event)
        return root

    def _counted(self, events: Sequence[Any]) -> Iterator[Any]:
        for count, event in enumerate(events):
            self._refuse_too_much(event, count, 0)
            yield event

    def _node(self, event: Any, *, is_key: bool = False) -> YamlNode:
        """Return the node that begins with the event. Variables are never filled in inside a key."""
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                self._stop(f"`*{event.anchor}` has no anchor: no finished `&{event.anchor}` comes before it", event)
            return replace(self.anchors[event.anchor], place=self._place(event))
        self._refuse_tag(event)
        is_scalar = isinstance(event, yaml.ScalarEvent)
        node = self._scalar(event, is_key=is_key) if is_scalar else self._collection(event, is_key=is_key)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def _collection(self, event: Any, *, is_key: bool) -> YamlNode:
        is_mapping = isinstance(event, yaml.MappingStartEvent)
        if is_key:
            hint = "text that begins with `{` needs quotes; a variable is `${NAME}`" if is_mapping else ""
            self._stop(f"a {'mapping' if is_mapping else 'list'} cannot be a key", event, hint)
        self._refuse_too_much(event, 1, len(self.path))
        members: dict[str, YamlNode] = {}  # of a list by their indexes
        while not isinstance(inner := next(self.events), yaml.CollectionEndEvent):
            key, place = self._key(inner) if is_mapping else (str(len(members)), self._place(inner))
            self.path.append(key)
            node = self._node(next(self.events) if is_mapping else inner)
            if key in members:
                first = members[key].key or place
                self._fault(f"duplicate key `{key}`", place, "keep one of the two", also=(first,))
            else:
                members[key] = replace(node, key=place if is_mapping else None)
            self.path.pop()
        nodes = tuple(members.values())
        size, depth = 1 + sum(node.size for node in nodes), 1 + max((node.depth for node in nodes), default=0)
        self._refuse_too_much(event, size, depth)
        return YamlNode(members if is_mapping else nodes, self._place(event), size=size, depth=depth)

    def _key(self, event: Any) -> tuple[str, Place]:
        """Return a key and its place. A plain scalar such as `1.10` is a key as written."""
        node = self._node(event, is_key=True)
        key = node.text if node.plain else node.value
        if not isinstance(key, str) or isinstance(node.value, tuple | dict):
            raise _StopReadingError(Fault("a key must be a word", place=node.place))
        if key == "<<" and node.plain:
            hint = "merge keys left YAML with version 1.2: write the keys out, or share single values with `*name`"
            raise _StopReadingError(Fault("`<<` does not merge here", place=node.place, hint=hint))
        return key, node.place

    def _scalar(self, event: Any, *, is_key: bool) -> YamlNode:
        place = self._place(event)
        plain = event.style in (None, "")
        faults_before = len(self.faults)
        text, shown = event.value, ""
        # Only a plain scalar that is a single `${NAME}` can become a number.
        reread = plain and _REFERENCE.fullmatch(text) is not None and not text.startswith("$$")
        if "${" in text and not is_key:
            text, shown = self._filled(event)
        if _NOT_TEXT.search(text):
            self._fault("a NUL or half a character is not text", place)
            text = _NOT_TEXT.sub("?", text)
        value: Any = text
        if plain and (reread or text == event.value):
            try:
                value = scalar(text)
            except ValueError:
                self._fault("expected a finite number", place)
                value = 0.0
        broken = len(self.faults) > faults_before
        return YamlNode(value, place, text=text, plain=plain, shown=shown, broken=broken)

    def _filled(self, event: Any) -> tuple[str, str]:
        """Return the scalar with variables filled in, and the text for messages if a variable looks secret, else ""."""
        # Search each `${` in the text of the file: quotes and escapes make offsets in the scalar differ.
        cursor = self.source.starts[min(event.start_mark.line, len(self.source.starts) - 1)] + event.start_mark.column
        secret = False
        key = self.path[0] if self.path else ""
        of_node = _OF_NODE.get(key)

        def fill(match: re.Match[str]) -> str:
            nonlocal cursor, secret
            found = self.source.text.find(match[0][:2], cursor)
            start, cursor = (found, found + len(match[0])) if found >= 0 else (cursor, cursor)
            if match[0] == "$${":
                is_escape = of_node and key != "setup" and of_node.match(event.value, match.end())
                return "$${" if is_escape else "${"  # the node reads `$$`
            if of_node and of_node.match(match[0], 2):
                return match[0]
            name = _VARIABLE.fullmatch(match[1])
            if name is None or not match[0].endswith("}"):
                hint = "write `${NAME}` or `${NAME:-default}`; `$${` keeps a `${` as it is"
                if theirs := _OF_AZURE.match(match[0]):
                    own = f"INPUT_{theirs[2].upper()}" if theirs[1] == "inputs" else "OUTPUT_DIR"
                    hint = f"write `$CLOUDTRAIN_{own}`, a path on the node; `$${{` keeps a `${{` as it is"
                self._fault(f"`{match[0]}` is not a variable", self.source.at(start), hint)
                return ""
            secret = secret or bool(SECRET_NAME.search(name[1]))
            value = self.environ.get(name[1])
            if name[2] is not None:
                return value or name[2]
            if value is None:
                message = f"the environment variable `{name[1]}` is not set"
                self._fault(message, self.source.at(start), _missing_hint(name[1]))
            return value or ""

        text = _REFERENCE.sub(fill, event.value)
        return text, event.value if secret else ""

    def _place(self, event: Any) -> Place:
        return self.source.place(event.start_mark.line, event.start_mark.column)

    def _refuse_tag(self, event: Any) -> None:
        if event.tag is not None:
            short = event.tag.replace("tag:yaml.org,2002:", "!!")
            hint = "remove it: quotes make text, their absence makes numbers"
            self._fault(f"the tag `{short}` has no meaning here", self._place(event), hint)

    def _refuse_too_much(self, event: Any, size: int, depth: int) -> None:
        if size > _MAX_VALUES:
            self._stop(f"more than {_MAX_VALUES} values, aliases counted", event)
        if depth > _MAX_DEPTH:
            self._stop(f"nested more than {_MAX_DEPTH} levels deep, aliases counted", event)

    def _fault(self, message: str, place: Place, hint: str = "", also: tuple[Place, ...] = ()) -> None:
        self.faults.append(Fault(message, ".".join(filter(None, self.path)), place, hint, also))

    def _stop(self, message: str, event: Any, hint: str = "") -> NoReturn:
        raise _StopReadingError(Fault(message, place=self._place(event), hint=hint))


def _missing_hint(name: str) -> str:
    if name.startswith("CLOUDTRAIN_"):
        return "the node sets this variable: only `args`, `env`, `resume_args` and `setup` may hold it"
    return f"export it, or give a default: `${{{name}:-...}}`; `$${{` keeps a `${{` as it is"
