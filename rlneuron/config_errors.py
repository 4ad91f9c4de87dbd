"""One sentence per mistake in a run file: place, key, value given, values allowed, what to write.

Turns pydantic's errors into `Problem`s and a `Problem` into a sentence with its file, line and column.
"""

import difflib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, ValidationError

from rlneuron.config_names import NAMES_ELSEWHERE, TRL_NOT_HERE
from rlneuron.prompts import shorten
from rlneuron.yaml_file import Document, KeyPath

_YES_NO = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with the key at `path`."""

    path: KeyPath
    text: str
    at_key: bool = False
    """The name of the key is wrong, not its value."""


def sentence(problem: Problem, document: Document, fallback: str) -> str:
    """'run.yaml:3:18: train.learning_rate: ...'; `fallback` is named for a key that is written nowhere."""
    origin = document.origin(problem.path)
    place = fallback if origin is None else origin.at_key() if problem.at_key else origin.at_value()
    return f"{place}: {dotted(problem.path)}: {problem.text}"


def dotted(path: KeyPath) -> str:
    """('reward', 'funcs', 0) -> 'reward.funcs[0]'."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def validation_problems(error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    """One problem per pydantic error."""
    problems: dict[KeyPath, Problem] = {}
    for item in error.errors(include_url=False, include_context=False):
        path = item["loc"]
        if item["type"] == "extra_forbidden":
            problem = Problem(path, unknown_key(path, root), at_key=True)
        elif item["type"] == "missing":
            problem = _missing(path, root)
        else:
            problem = Problem(path, _wrong_value(item["input"], *_field_at(path, root)))
        problems.setdefault(problem.path, problem)
    return list(problems.values())


def _missing(path: KeyPath, root: type[BaseModel]) -> Problem:
    annotation, metadata = _field_at(path, root)
    inner = inner_section(annotation)
    required = [name for name, field in inner.model_fields.items() if field.is_required()] if inner else []
    if required:
        assert inner is not None
        path = (*path, required[0])
        annotation, metadata = _field_at(path, root)
    if path == ("data",):
        return Problem(path, "missing; write data.path or data.reasoning_gym")
    return Problem(path, f"missing; write {describe(annotation, metadata)}")


# ---- wrong values -------------------------------------------------------------------------------------------------
def _wrong_value(given: Any, annotation: Any, metadata: tuple[Any, ...]) -> str:
    return f"{_given(given)}; allowed: {describe(annotation, metadata)}{_hint(given, annotation)}"


def _given(value: Any) -> str:
    if value is None:
        return "null is given"
    if isinstance(value, bool):
        return f"{str(value).lower()} is given"
    if isinstance(value, str):
        return f"the text {shorten(value)} is given"
    if isinstance(value, dict):
        return "a mapping is given"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)} is given"
    return f"{value!r} is given"


def _hint(given: Any, annotation: Any) -> str:
    kinds = set(_kinds(annotation))
    if isinstance(given, str) and bool in kinds and given.lower() in _YES_NO:
        return f"; YAML 1.2 reads {given} as text, write {_YES_NO[given.lower()]}"
    if isinstance(given, str) and kinds & {int, float} and _is_number(given):
        return f"; write {given.strip()} without quotes"
    if isinstance(given, str) and bool in kinds and given.lower() in ("true", "false"):
        return f"; write {given.lower()} without quotes"
    if isinstance(given, str):
        choices = [str(choice) for choice in _choices(annotation)]
        near = difflib.get_close_matches(given.lower(), choices, n=1)
        return f"; nearest: {near[0]}" if near else ""
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _kinds(annotation: Any) -> Iterator[Any]:
    """The plain types inside a possibly optional, annotated or literal type."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _kinds(part)
    elif origin is typing.Annotated:
        yield from _kinds(typing.get_args(annotation)[0])
    elif origin is Literal:
        yield from {type(choice) for choice in typing.get_args(annotation)}
    else:
        yield origin or annotation


def _choices(annotation: Any) -> Iterator[Any]:
    origin = typing.get_origin(annotation)
    if origin is Literal:
        yield from typing.get_args(annotation)
    elif origin in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _choices(part)


def describe(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """The values that a key allows, in words: 'a whole number >= 1, or null'."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(annotation) if part is not type(None)]
        text = " or ".join(describe(part, metadata) for part in parts)
        return f"{text}, or null" if len(parts) < len(typing.get_args(annotation)) else text
    if origin is typing.Annotated:
        inner, *extra = typing.get_args(annotation)
        return describe(inner, (*_flat(extra), *metadata))
    if origin is Literal:
        return "one of " + ", ".join(str(c).lower() if isinstance(c, bool) else c for c in typing.get_args(annotation))
    if origin is tuple:
        at_least = " with at least one item" if any(isinstance(m, MinLen) for m in metadata) else ""
        return f"a list{at_least}, each item {describe(typing.get_args(annotation)[0])}"
    if annotation is bool:
        return "true or false"
    if annotation in (int, float):
        return ("a whole number" if annotation is int else "a number") + _bounds(metadata)
    if annotation is str:
        return "text that is not empty" if any(isinstance(m, MinLen) for m in metadata) else "text"
    section = inner_section(annotation)
    if section is not None:
        text = "a mapping with the keys " + ", ".join(section.model_fields)
        return f"a function's name, or {text}" if section.__name__ == "RewardCall" else text
    return "a mapping"


def _flat(extra: list[Any]) -> list[Any]:
    """Constraints inside pydantic's Field(...) objects and beside them."""
    return [inner for item in extra for inner in getattr(item, "metadata", None) or [item]]


def _bounds(metadata: tuple[Any, ...]) -> str:
    signs = []
    for item in metadata:
        if isinstance(item, Ge):
            signs.append(f">= {item.ge}")
        elif isinstance(item, Gt):
            signs.append(f"> {item.gt}")
        elif isinstance(item, Le):
            signs.append(f"<= {item.le}")
        elif isinstance(item, Lt):
            signs.append(f"< {item.lt}")
    return " " + " and ".join(signs) if signs else ""


# ---- unknown keys -------------------------------------------------------------------------------------------------
def unknown_key(path: KeyPath, root: type[BaseModel]) -> str:
    """What to write instead of a key that does not exist at `path`."""
    key = str(path[-1])
    name = key.replace("-", "_")
    all_keys = list(_all_keys(root))
    homes = [known for known in all_keys if known.rsplit(".", 1)[-1] == name]
    here = dotted((*path[:-1], name))
    if here in all_keys:
        return f"unknown key; write {here}"
    if len(path) == 1 and name in root.model_fields:
        return f"unknown section; write {name}"
    if homes:
        return f"unknown key here; write {' or '.join(homes)}"
    advice = TRL_NOT_HERE.get(name) or NAMES_ELSEWHERE.get(name)
    if advice:
        return f"unknown key; {advice}"
    return f"unknown key; {_nearest(path, name, root, all_keys)}"


def _nearest(path: KeyPath, name: str, root: type[BaseModel], all_keys: list[str]) -> str:
    section, _ = _field_at(path[:-1], root) if len(path) > 1 else (root, ())
    inner = inner_section(section)
    siblings = list(inner.model_fields) if inner else []
    prefix = dotted(path[:-1])

    def closeness(known: str) -> float:
        leaf = known.rsplit(".", 1)[-1]
        bonus = 0.05 if known == (f"{prefix}.{leaf}" if prefix else leaf) else 0.0
        return difflib.SequenceMatcher(None, name, leaf).ratio() + bonus

    best = max([*all_keys, *(f"{prefix}.{s}" if prefix else s for s in siblings)], key=closeness)
    if closeness(best) >= 0.65:
        return f"nearest: {best}"
    return f"the keys here are {', '.join(siblings)}"


def _all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = inner_section(field.annotation)
        if prefix:
            yield prefix + name
        if inner is not None and name != "funcs":
            yield from _all_keys(inner, f"{prefix}{name}.")


# ---- fields by path -----------------------------------------------------------------------------------------------
def inner_section(annotation: Any) -> type[BaseModel] | None:
    """The section class inside a field's type, or None for a plain value."""
    if isinstance(annotation, type) and not typing.get_args(annotation) and issubclass(annotation, BaseModel):
        return annotation
    for part in typing.get_args(annotation):
        found = inner_section(part)
        if found is not None:
            return found
    return None


def _field_at(path: KeyPath, root: type[BaseModel]) -> tuple[Any, tuple[Any, ...]]:
    """(type, constraints) of the field at a key path; list indices give the type of the items."""
    annotation: Any = root
    metadata: tuple[Any, ...] = ()
    for part in path:
        if isinstance(part, int):
            annotation, metadata = _item_type(annotation), ()
            continue
        section = inner_section(annotation)
        if section is None or part not in section.model_fields:
            break
        field = section.model_fields[part]
        annotation, metadata = field.annotation, tuple(field.metadata)
    return annotation, metadata


def _item_type(annotation: Any) -> Any:
    for part in [annotation, *typing.get_args(annotation)]:
        while typing.get_origin(part) is typing.Annotated:
            part = typing.get_args(part)[0]
        if typing.get_origin(part) is tuple:
            return typing.get_args(part)[0]
    return annotation
