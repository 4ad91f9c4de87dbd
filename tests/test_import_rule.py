"""Who may import whom: read off the syntax trees, so that a forbidden import fails even where it is never executed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("device", "rollout", "trainer")
STDLIB = set(sys.stdlib_module_names)


def imported(tree: ast.AST, package: str) -> set[str]:
    """Absolute names of everything that a module imports; relative imports are resolved against `package`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def violations(path: Path, source: str) -> list[str]:
    """The imports of one file that the rule forbids. `path` is relative to the project's root."""
    room = path.parts[0]
    parts = ("rlneuron", *path.with_suffix("").parts) if room in ROOMS else path.with_suffix("").parts
    package = ".".join(parts[:-1])
    wrong = []
    for name in sorted(imported(ast.parse(source), package)):
        top, second = [*name.split("."), ""][:2]
        if room == "device":
            fine = top in STDLIB | {"torch"} or (top, second) in {("rlneuron", "device"), ("rlneuron", "")}
        elif room in ("rollout", "trainer"):
            fine = top not in {"ray", "rlneuron"} or (top, second) in {
                ("rlneuron", room),
                ("rlneuron", "device"),
                ("rlneuron", ""),
            }
        elif room == "examples":
            fine = not any(part.startswith("_") and not part.startswith("__future__") for part in name.split("."))
        else:
            fine = True
        if not fine or (top == "ray" and room != "rlneuron"):
            wrong.append(name)
    return wrong


def files() -> list[Path]:
    own = [p.relative_to(ROOT) for p in (ROOT / "rlneuron").glob("*.py")]
    rest = [p.relative_to(ROOT) for folder in (*ROOMS, "examples") for p in (ROOT / folder).rglob("*.py")]
    return sorted([*own, *(p for p in rest if "standin" not in p.parts)])


@pytest.mark.parametrize("path", files(), ids=str)
def test_a_file_imports_only_what_its_room_may(path: Path) -> None:
    assert violations(path, (ROOT / path).read_text()) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("device/x.py", "import transformers"),
        ("device/x.py", "from rlneuron.rollout import LLM"),
        ("rollout/x.py", "from rlneuron.trainer import Learner"),
        ("rollout/x.py", "from rlneuron import models"),
        ("trainer/x.py", "import ray"),
        ("trainer/x.py", "def f():\n    from ray import get"),
        ("trainer/x.py", "from ..config import RunConfig"),
        ("examples/x.py", "from rlneuron.trainer._private import x"),
    ],
)
def test_the_rule_rejects(path: str, source: str) -> None:
    assert violations(Path(path), source)


def test_rooms_are_links_to_the_top_level() -> None:
    for room in ROOMS:
        link = ROOT / "rlneuron" / room
        assert link.is_symlink() and str(link.readlink()) == f"../{room}"
