"""YAML 1.2 with positions: every value knows its file, line and column, so that an error can name them.

Scalars follow YAML 1.2 (`1e-6` is a number, `no` and `on` are text). Knows nothing about the keys of a run.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

KeyPath = tuple[str | int, ...]

# A file of nested aliases can unfold to any size; no configuration comes near this.
MAX_VALUES = 20_000


class YamlProblem(ValueError):
    """What is wrong with the text of a file or of an assignment; str() is one sentence with the place."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written. Lines and columns count from 1; 0 = a command line assignment."""

    source: str
    line: int = 0
    column: int = 0
    key_line: int = 0
    key_column: int = 0
    folder: Path = field(default_factory=Path)
    """Relative paths written here are looked for in this folder first."""

    def at_value(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source

    def at_key(self) -> str:
        return f"{self.source}:{self.key_line}:{self.key_column}" if self.line else self.source


@dataclass(slots=True)
class Document:
    """A nested dict of plain values, and the origin of every value by its key path."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict, compare=False)

    def overlay(self, other: "Document") -> None:
        """Merges `other` over this one: mappings key by key, everything else (lists too) as a whole."""
        _merge(self.values, other.values, (), self.origins)
        self.origins.update(other.origins)

    def origin(self, path: KeyPath) -> Origin | None:
        """Where the value at `path`, or the nearest value around it, was written."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return None


def _merge(below: dict[str, Any], above: dict[str, Any], path: KeyPath, origins: dict[KeyPath, Origin]) -> None:
    for key, value in above.items():
        here = (*path, key)
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _merge(below[key], value, here, origins)
            continue
        if value is None and isinstance(below.get(key), dict) and not path:
            continue  # a section whose lines are all commented out changes nothing
        for old in [known for known in origins if known[: len(here)] == here]:
            del origins[old]
        below[key] = value


def read_yaml(path: Path) -> Document:
    """The mapping in a YAML file. YamlProblem if the file is missing, unreadable or not a mapping of text keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise YamlProblem(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise YamlProblem(f"{path}: cannot be read: {reason}") from error
    node = _compose(text, str(path))
    if node is None:
        return Document()
    if not isinstance(node, MappingNode):
        raise YamlProblem(f"{path}:{node.start_mark.line + 1}: a run file must be a mapping of sections")
    document = Document()
    reader = _Reader(str(path), path.resolve().parent, document)
    document.values = reader.mapping(node, ())
    return document


def read_assignment(text: str) -> Document:
    """One command line assignment `section.key=value`; the value follows the same YAML rules as in a file."""
    source = f"command line {text!r}"
    left, equals, right = text.partition("=")
    keys = left.strip().split(".")
    if not equals or not all(re.fullmatch(r"[A-Za-z_][\w-]*", key) for key in keys):
        raise YamlProblem(f"{source}: not an assignment; write section.key=value")
    if not right.strip():
        raise YamlProblem(f"{source}: no value; write {left.strip()}=null to unset the key")
    node = _compose(right, source)
    assert node is not None, "the text is not empty"
    document = Document()
    reader = _Reader(source, Path.cwd(), document, on_command_line=True)
    value = reader.value(node, tuple(keys))
    for depth in range(1, len(keys) + 1):
        document.origins.setdefault(tuple(keys[:depth]), Origin(source, folder=Path.cwd()))
    for key in reversed(keys):
        value = {key: value}
    document.values = value
    return document


def _compose(text: str, source: str) -> Node | None:
    loader = YAML(typ="safe", pure=True)
    try:
        nodes = list(_documents(loader, text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = source if mark is None or source.startswith("command line") else _place(source, mark)
        problem = (error.problem or error.context or "not valid YAML").strip()
        raise YamlProblem(f"{place}: not valid YAML: {problem}{_indent_hint(problem)}") from None
    except YAMLError as error:
        reason = str(error).strip().splitlines()[0]
        raise YamlProblem(f"{source}: not valid YAML: {reason}") from None
    if len(nodes) > 1:
        raise YamlProblem(f"{_place(source, nodes[1].start_mark)}: a second document; one file holds one run")
    return nodes[0] if nodes else None


def _documents(loader: YAML, text: str) -> Iterator[Node]:
    yield from loader.compose_all(text)


def _place(source: str, mark: Any) -> str:
    return f"{source}:{mark.line + 1}:{mark.column + 1}"


def _indent_hint(problem: str) -> str:
    if "found character '\\t'" in problem or "block mapping" in problem or "mapping values" in problem:
        return " (check the indentation of this line, with spaces only, and that texts with ': ' are quoted)"
    return ""


class _Reader:
    """Turns composed nodes into plain values, recording origins into a document."""

    def __init__(self, source: str, folder: Path, document: Document, *, on_command_line: bool = False) -> None:
        self.source = source
        self.folder = folder
        self.document = document
        self.on_command_line = on_command_line
        self.open_nodes: list[int] = []
        self.num_values = 0

    def value(self, node: Node, path: KeyPath, key: Node | None = None) -> Any:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise YamlProblem(f"{self.source}: more than {MAX_VALUES} values (aliases unfolded); not a run file")
        if id(node) in self.open_nodes:
            raise YamlProblem(f"{self.at(node)}: an alias that contains itself")
        self.document.origins[path] = self.origin(node, key or node)
        if not isinstance(node, ScalarNode) and str(node.tag).rsplit(":", 1)[-1] not in ("map", "seq"):
            raise YamlProblem(f"{self.at(node)}: the tag {node.tag} is not allowed; write a plain value")
        self.open_nodes.append(id(node))
        try:
            if isinstance(node, MappingNode):
                return self.mapping(node, path)
            if isinstance(node, SequenceNode):
                return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
            assert isinstance(node, ScalarNode)
            return self.scalar(node)
        finally:
            self.open_nodes.pop()

    def mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        merged: list[Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                merged.extend(value_node.value if isinstance(value_node, SequenceNode) else [value_node])
                continue
            if not isinstance(key_node, ScalarNode):
                raise YamlProblem(f"{self.at(key_node)}: a key must be a name")
            key = str(key_node.value)
            if key in values:
                raise YamlProblem(
                    f"{self.at(key_node)}: the key {'.'.join(map(str, (*path, key)))} is given twice "
                    f"(first on line {lines[key]}); remove one"
                )
            lines[key] = key_node.start_mark.line + 1
            values[key] = self.value(value_node, (*path, key), key_node)
        for source in merged:
            if not isinstance(source, MappingNode):
                raise YamlProblem(f"{self.at(source)}: '<<' must name a mapping")
            self.merge_missing(values, source, path)
        return values

    def merge_missing(self, values: dict[str, Any], source: MappingNode, path: KeyPath) -> None:
        """`<<: *name`: takes the keys that are not given here."""
        for key_node, value_node in source.value:
            key = str(key_node.value)
            if key not in values:
                values[key] = self.value(value_node, (*path, key), key_node)

    def scalar(self, node: ScalarNode) -> Any:
        kind = str(node.tag).rsplit(":", 1)[-1]
        text = str(node.value)
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "int":
            return self._int(node, text)
        if kind == "float":
            return self._float(node, text)
        if kind in ("str", "timestamp", "value"):
            return text
        raise YamlProblem(f"{self.at(node)}: the tag {node.tag} is not allowed; write a plain value")

    def _int(self, node: ScalarNode, text: str) -> int:
        try:
            digits = text.replace("_", "")
            # YAML 1.2: leading zeros are decimal, 0o is octal.
            return int(digits, 0) if re.match(r"[-+]?0[xob]", digits) else int(digits)
        except ValueError:
            raise YamlProblem(f"{self.at(node)}: {text!r} is not a number") from None

    def _float(self, node: ScalarNode, text: str) -> float:
        lowered = text.replace("_", "").lower()
        if lowered.endswith((".inf", ".nan")):
            return math.nan if lowered.endswith("nan") else math.copysign(math.inf, -1 if lowered[0] == "-" else 1)
        try:
            return float(lowered)
        except ValueError:
            raise YamlProblem(f"{self.at(node)}: {text!r} is not a number") from None

    def origin(self, node: Node, key: Node) -> Origin:
        if self.on_command_line:
            return Origin(self.source, folder=self.folder)
        return Origin(
            self.source,
            node.start_mark.line + 1,
            node.start_mark.column + 1,
            key.start_mark.line + 1,
            key.start_mark.column + 1,
            self.folder,
        )

    def at(self, node: Node) -> str:
        return self.source if self.on_command_line else _place(self.source, node.start_mark)


def dump_yaml(values: dict[str, Any], comments: Sequence[str] = ()) -> str:
    """YAML 1.2 text of plain values in their order, which `read_yaml` reads back to equal values and types."""
    lines = [f"# {comment}" for comment in comments]
    _dump(values, "", lines)
    return "\n".join(lines) + "\n"


def _dump(values: dict[str, Any], indent: str, lines: list[str]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            lines.append(f"{indent}{key}:")
            _dump(value, indent + "  ", lines)
        else:
            lines.append(f"{indent}{key}: {_flow(value)}")


def _flow(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}[repr(value)]
    if isinstance(value, int):
        return str(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(str(key))}: {_flow(item)}" for key, item in value.items()) + "}"
    return _text(str(value))


def _text(text: str) -> str:
    # Plain style only where no reader could see anything but this text.
    if re.fullmatch(r"[A-Za-z_/][\w./-]*( [\w./-]+)*", text) and text.lower() not in _WORDS_WITH_OTHER_MEANINGS:
        return text
    escaped = "".join(_escaped(character) for character in text)
    return f'"{escaped}"'


_WORDS_WITH_OTHER_MEANINGS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character == "\n":
        return "\\n"
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
