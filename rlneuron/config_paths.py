"""Relative paths in a run file: looked for beside the file that names them, then in the working directory.

What exists becomes an absolute path in the configuration; a file that is missing is a problem; what looks like a hub
id stays as it is.
"""

import re
from pathlib import Path
from typing import Any

from rlneuron.config_errors import Problem
from rlneuron.yaml_file import Document, KeyPath

DATA_SUFFIXES = (".jsonl", ".parquet")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_paths(document: Document) -> list[Problem]:
    """Replaces paths in `document` by absolute ones; problems for those that are missing."""
    problems: list[Problem] = []
    for path, check in (
        (("model", "path"), _model),
        (("data", "path"), _data),
        (("data", "eval", "path"), _data),
        (("train", "resume"), _checkpoint),
    ):
        holder = _holder(document.values, path)
        if holder is not None and isinstance(holder.get(path[-1]), str) and holder[path[-1]]:
            _replace(holder, path[-1], path, check, document, problems)
    funcs = (_holder(document.values, ("reward", "funcs")) or {}).get("funcs")
    for index, item in enumerate(funcs if isinstance(funcs, list) else []):
        if isinstance(item, str):
            _replace(funcs, index, ("reward", "funcs", index), _reward, document, problems)
        elif isinstance(item, dict) and isinstance(item.get("func"), str):
            _replace(item, "func", ("reward", "funcs", index, "func"), _reward, document, problems)
    return problems


def _holder(values: dict[str, Any], path: KeyPath) -> dict[str, Any] | None:
    current: Any = values
    for part in path[:-1]:
        current = current.get(part) if isinstance(current, dict) else None
    return current if isinstance(current, dict) else None


def _replace(holder: Any, key: Any, path: KeyPath, check: Any, document: Document, problems: list[Problem]) -> None:
    origin = document.origin(path)
    folders = [folder for folder in (origin.folder if origin else None, Path.cwd()) if folder is not None]
    try:
        holder[key] = check(holder[key], list(dict.fromkeys(folders)))
    except ValueError as error:
        problems.append(Problem(path, str(error)))


def _found(text: str, folders: list[Path]) -> Path | None:
    for folder in folders:
        candidate = (folder / Path(text).expanduser()).resolve()
        if candidate.exists():
            return candidate
    return None


def _looked_in(folders: list[Path]) -> str:
    return "looked in " + " and ".join(str(folder) for folder in folders)


def _model(text: str, folders: list[Path]) -> str:
    if text.startswith("rlneuron/"):
        return text  # made by rlneuron itself
    found = _found(text, folders)
    if found is None:
        if _HUB_ID.fullmatch(text):
            return text
        raise ValueError(f"the folder {text!r} does not exist ({_looked_in(folders)}); write a folder or a hub id")
    if not (found / "config.json").is_file():
        raise ValueError(f"{str(found)!r} is no model folder: it holds no config.json")
    return str(found)


def _data(text: str, folders: list[Path]) -> str:
    found = _found(text, folders)
    suffix = Path(text).suffix
    if found is None:
        if suffix not in DATA_SUFFIXES and suffix not in (".json", ".csv", ".txt") and _HUB_ID.fullmatch(text):
            return text
        raise ValueError(f"the file {text!r} does not exist ({_looked_in(folders)})")
    if found.is_file() and suffix not in DATA_SUFFIXES:
        raise ValueError(f"the file {text!r} has the ending {suffix!r}; allowed: {', '.join(DATA_SUFFIXES)}, a folder")
    return str(found)


def _checkpoint(text: str, folders: list[Path]) -> str:
    if text in ("never", "auto"):
        return text
    found = _found(text, folders)
    if found is None or not found.is_dir():
        raise ValueError(f"{text!r} is not a checkpoint folder ({_looked_in(folders)}); allowed: never, auto, a folder")
    return str(found)


def _reward(text: str, folders: list[Path]) -> str:
    file, colon, function = text.rpartition(":")
    if not colon:
        from rlneuron.builtin_rewards import BUILTIN_FACTORIES, BUILTIN_REWARDS, unknown_builtin

        if text not in BUILTIN_REWARDS and text not in BUILTIN_FACTORIES:
            raise ValueError(unknown_builtin(text))
        return text
    if not file.endswith(".py"):
        return text
    found = _found(file, folders)
    if found is None or not found.is_file():
        raise ValueError(f"the file {file!r} does not exist ({_looked_in(folders)})")
    return f"{found}:{function}"
