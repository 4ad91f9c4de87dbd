"""Compiling: its errors, its cache key, and processes that build at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlneuron.device import build

PROGRAM = """
import sys
from pathlib import Path
from rlneuron.device import build
build.SOURCES = {"ops": Path(sys.argv[1])}
(path,) = build.build()
print(path.exists())
"""


def start(sources: Path, cache: Path) -> subprocess.Popen[str]:
    """A process that builds the library whose sources lie in `sources`."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(sources)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    sources = tmp_path / "csrc"
    sources.mkdir()
    return sources, tmp_path / "cache"


def test_two_processes_build_at_once(folders: tuple[Path, Path]) -> None:
    sources, cache = folders
    (sources / "nothing.cpp").write_text("int rlneuron_nothing() { return 0; }\n")
    both = [start(sources, cache), start(sources, cache)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert [out.strip() for out, _ in outputs] == ["True", "True"]
    assert "compiling the neuron backend" in outputs[0][1]
    assert len(list((cache / "rlneuron" / "build").glob("ops-*/*.so"))) == 1


def test_a_compile_error_is_shown(folders: tuple[Path, Path]) -> None:
    sources, cache = folders
    (sources / "wrong.cpp").write_text("int nothing() { return absent; }\n")
    process = start(sources, cache)
    _, message = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "absent" in message and "Traceback" not in message


def test_the_cache_key_covers_the_sources(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    sources, _ = folders
    monkeypatch.setattr(build, "SOURCES", {"ops": sources})
    assert not build.has_sources("ops") and not build.is_built("ops") and build.build() == []
    (sources / "a.cpp").write_text("int a;")
    first = build.library_path("ops")
    (sources / "a.cpp").write_text("int b;")
    assert build.library_path("ops") != first


@pytest.fixture
def unbuilt(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """One source that is not compiled yet; returns the folder of the cache."""
    sources, cache = folders
    (sources / "a.cpp").write_text("int a;")
    monkeypatch.setattr(build, "SOURCES", {"ops": sources})
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache


def test_a_missing_compiler_is_one_sentence(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match=r"no C\+\+ compiler found"):
        build.build()


def test_missing_python_headers_are_one_sentence(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(unbuilt))
    with pytest.raises(SystemExit, match=r"Python.h not found; install it"):
        build.build()


def test_a_full_disk_is_one_sentence(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FREE_BYTES_NEEDED", 2**80)
    with pytest.raises(SystemExit, match=r"MiB free in .*MiB needed; free some space or set XDG_CACHE_HOME"):
        build.build()
