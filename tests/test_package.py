"""The wheel: what is in it, that it works from any folder, and the entry point that `import torch` calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rlneuron.device import build

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("device", "rollout", "trainer")
SHIPPED_SUFFIXES = {".py", ".cpp", ".h", ".typed"}


def expected_files() -> set[str]:
    """Names that the wheel must hold beside its metadata: every source file of `rlneuron/` and of the rooms."""
    names = {f"rlneuron/{path.name}" for path in (ROOT / "rlneuron").iterdir() if path.is_file()}
    names.update(str(path.relative_to(ROOT)) for path in (ROOT / "rlneuron" / "fused").glob("*.py"))
    for room in ROOMS:
        paths = (path for path in (ROOT / room).rglob("*") if path.suffix in SHIPPED_SUFFIXES)
        names.update(f"rlneuron/{path.relative_to(ROOT)}" for path in paths)
    return names


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that must succeed; `environment` is set on top of this process's."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: setuptools leaves build/ and egg-info beside what it builds."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, source)
    for name in ("rlneuron", *ROOMS):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "wheel", *flags, "-w", str(out), str(source), cwd=out)
    (made,) = out.glob("rlneuron-*.whl")
    return made


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what an installation of the wheel puts into site-packages."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_holds_every_room_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith(".dist-info/entry_points.txt"))
        entry_points = archive.read(metadata).decode().split("\n")
    assert {name for name in names if ".dist-info/" not in name} == expected_files()
    assert "rlneuron/device/csrc/dispatch.cpp" in names and "rlneuron/device/ops/csrc/simd.h" in names
    assert "rlneuron/device/standin/torch_neuronx/__init__.py" in names and "rlneuron/py.typed" in names
    assert {"rlneuron = rlneuron.cli:main", "rlneuron = rlneuron.device.autoload:autoload"} <= set(entry_points)


def test_the_wheel_works_from_another_folder(unpacked: Path, tmp_path: Path) -> None:
    program = (
        "import sys, torch\n"
        "from rlneuron import device, rollout, trainer\n"
        "from rlneuron.device import build, oplog, select\n"
        "chosen = select.choose('neuron', simulate=True)\n"
        "left, right = torch.ones(2, 3, device=chosen.device), torch.ones(3, 4, device=chosen.device)\n"
        "import torch_neuronx\n"
        "print(device.__file__, build.library_path('neuron'), build.library_path('ops'), chosen.device,\n"
        "      (left @ right).sum().item(), oplog.totals().flops, torch_neuronx.__file__, sep='\\n')"
    )
    lines = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(unpacked)).stdout.splitlines()
    room = unpacked / "rlneuron" / "device"
    libraries = [str(build.library_path(name)) for name in ("neuron", "ops")]
    standin = room / "standin" / "torch_neuronx" / "__init__.py"
    assert lines == [str(room / "__init__.py"), *libraries, "neuron:0", "24.0", str(2 * 2 * 3 * 4), str(standin)]


def test_the_commands_of_the_wheel_start(unpacked: Path, tmp_path: Path) -> None:
    for module in ("rlneuron.train", "rlneuron.cli"):
        done = run(sys.executable, "-m", module, "--help", cwd=tmp_path, PYTHONPATH=str(unpacked))
        assert "Usage" in done.stdout


def test_import_torch_makes_neuron_the_accelerator_only_when_asked(tmp_path: Path) -> None:
    """Through the entry point of this very installation; nothing of ours but the entry point's module is imported."""
    program = (
        "import sys, torch\n"
        "ours = sorted(m for m in sys.modules if m.startswith(('rlneuron', 'torch.neuron')))\n"
        "print(torch.accelerator.current_accelerator(), *ours)"
    )
    asked = run(sys.executable, "-c", program, cwd=tmp_path, RLNEURON_SIM="trn2.3xlarge").stdout.split()
    assert asked[0] == "neuron" and "torch.neuron" in asked
    plain = run(sys.executable, "-c", program, cwd=tmp_path, RLNEURON_SIM="").stdout.split()
    assert plain == ["None", "rlneuron", "rlneuron.device", "rlneuron.device.autoload"]
