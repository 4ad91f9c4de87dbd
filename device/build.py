"""Compiles the two native libraries and finds them again.

`ops` holds the CPU kernels of `device/ops/csrc`, used on `cpu` and on the simulated `neuron`; `neuron` holds the
PrivateUse1 backend of `device/csrc`. Both are tied to one torch build (C++ internals, not its stable ABI) and to
the instruction set of this machine, so the name of a library's folder is a hash of these and of the sources.

Objects are compiled in a work folder that is kept, under a lock, so that an edit recompiles one file; the finished
library appears in its place by a rename. So processes that build at once all end with a whole library.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
SOURCES = {"neuron": HERE / "csrc", "ops": HERE / "ops" / "csrc"}
COMMON_FLAGS = ["-std=c++20", "-Wall"]
FLAGS = {
    # No associative-math: a sum must not depend on how the compiler vectorises it. OpenMP is torch's own copy.
    "ops": [*COMMON_FLAGS, "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp"],
    "neuron": [*COMMON_FLAGS, "-O2"],
}
FREE_BYTES_NEEDED = 200 * 2**20

_PROGRAM = """
import sys
from torch.utils.cpp_extension import load
name, folder, verbose, flags, *sources = sys.argv[1:]
load(f"rlneuron_{name}", sources, build_directory=folder, extra_cflags=flags.split(), is_python_module=False,
     verbose=verbose == "1")
"""


def cache_root() -> Path:
    """The user's cache folder for rlneuron (`XDG_CACHE_HOME` is honoured)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlneuron"


def _instruction_set() -> str:
    """What `-march=native` depends on: the CPU flags of Linux, elsewhere the machine's name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.machine()


def sources(name: str) -> list[Path]:
    """The C++ files of library `name`, headers included, in a fixed order."""
    return sorted(p for p in SOURCES[name].iterdir() if p.suffix in {".cpp", ".h"})


def has_sources(name: str) -> bool:
    """Whether there is anything to compile for library `name`."""
    return any(p.suffix == ".cpp" for p in sources(name))


def _hash(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


def _machine_parts(name: str) -> list[bytes]:
    parts = [torch.__version__, str(sys.implementation.cache_tag), _instruction_set(), *FLAGS[name]]
    return [part.encode() for part in parts]


def library_path(name: str) -> Path:
    """Where the compiled library `name` ("ops" or "neuron") lies, or will lie."""
    texts = [part for path in sources(name) for part in (path.name.encode(), path.read_bytes())]
    return cache_root() / "build" / f"{name}-{_hash(_machine_parts(name) + texts)}" / f"rlneuron_{name}.so"


def is_built(name: str) -> bool:
    """Whether library `name` is compiled for this torch, this machine and these sources."""
    return has_sources(name) and library_path(name).exists()


def build(*, verbose: bool = False) -> list[Path]:
    """Compiles whatever is not compiled yet; returns the libraries' paths. Safe to call from several processes.

    Raises SystemExit with one sentence when the compiler, ninja, Python's headers or disk space is missing, or with
    the compiler's message when a file does not compile.
    """
    names = [name for name in SOURCES if has_sources(name)]
    missing = [name for name in names if not library_path(name).exists()]
    if missing:
        _require_toolchain()
        print("compiling the neuron backend (about a minute, once per machine)", file=sys.stderr, flush=True)
        for name in missing:
            with _lock(name) as work_folder:
                if not library_path(name).exists():
                    _compile(name, work_folder, verbose=verbose)
    return [library_path(name) for name in names]


def _require_toolchain() -> None:
    if shutil.which("g++") is None and shutil.which("c++") is None:
        raise SystemExit("rlneuron build: no C++ compiler found; install one (Debian: apt-get install g++).")
    if shutil.which("ninja") is None and not (Path(sys.executable).parent / "ninja").exists():
        raise SystemExit("rlneuron build: ninja not found; run: pip install ninja")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise SystemExit("rlneuron build: Python.h not found; install it (Debian: apt-get install python3-dev).")
    cache_root().mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(cache_root()).free
    if free_bytes < FREE_BYTES_NEEDED:
        raise SystemExit(
            f"rlneuron build: {free_bytes >> 20} MiB free in {cache_root()}, {FREE_BYTES_NEEDED >> 20} MiB needed; "
            "free some space or set XDG_CACHE_HOME."
        )


@contextlib.contextmanager
def _lock(name: str) -> Iterator[Path]:
    """Yields the work folder of library `name`, owned by this process; the kernel frees it when the owner dies."""
    key = _hash([*_machine_parts(name), str(SOURCES[name]).encode()])
    folder = cache_root() / "build" / f"work-{name}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "owner").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        # What a killed build leaves: torch's own lock, for which the next one would wait for ever.
        (folder / "lock").unlink(missing_ok=True)
        yield folder


def _compile(name: str, work_folder: Path, *, verbose: bool) -> None:
    """Compiles in a process of its own, so that the `import torch` that builds never loads a half-built backend."""
    env = {
        **os.environ,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "MAX_JOBS": os.environ.get("MAX_JOBS", str(min(os.cpu_count() or 1, 8))),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    env.pop("RLNEURON_SIM", None)
    path = library_path(name)
    cpp = [str(p) for p in sources(name) if p.suffix == ".cpp"]
    arguments = [name, str(work_folder), str(int(verbose)), " ".join(FLAGS[name])]
    command = [sys.executable, "-c", _PROGRAM, *arguments, *cpp]
    done = subprocess.run(command, env=env, capture_output=not verbose, text=True, check=False)
    made = work_folder / f"rlneuron_{name}.so"
    if done.returncode != 0 or not made.exists():
        raise SystemExit(f"rlneuron build: compiling {name} failed:\n{_compiler_message(done)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    shutil.copy2(made, partial)
    partial.replace(path)


def _compiler_message(done: subprocess.CompletedProcess[str]) -> str:
    """The lines of the compiler's output that say what is wrong, else its end."""
    text = (done.stdout or "") + (done.stderr or "")
    errors = [line for line in text.splitlines() if "error" in line]
    return "\n".join(errors[:20]) or text[-4000:]
