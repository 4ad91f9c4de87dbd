"""`make setup`: what it says where something is missing, and that a second call does nothing. Installs nothing.

It runs on a copy of the Makefile, with stand-ins for the programs that it calls.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A python whose `-m venv FOLDER` makes a folder of programs that only note down their arguments.
PYTHON = """#!/bin/sh
if [ "$1" = -m ]; then
  mkdir -p "$3/bin"
  for name in pip rlneuron; do
    printf '#!/bin/sh\\necho "%s $*" >>"$LOG"\\necho "$PIP_SAYS"\\n[ "%s" != "$FAILS" ]\\n' $name $name >"$3/bin/$name"
    chmod +x "$3/bin/$name"
  done
  exit 0
fi
exec "$REAL_PYTHON" -c "$BEFORE
$2"
"""
DF = "#!/bin/sh\nprintf 'Filesystem blocks used free\\ndisk 9 9 %s\\n' \"$FREE\"\n"


class Checkout:
    """A copy of the Makefile beside a folder of programs, which is all that PATH holds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs = folder / "checkout", folder / "programs"
        self.log = folder / "log"
        self.folder.mkdir()
        self.programs.mkdir()
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy2(ROOT / name, self.folder)
        for name in ("sh", "mkdir", "chmod", "touch", "awk", "make"):
            found = shutil.which(name)
            assert found is not None, name
            (self.programs / name).symlink_to(found)
        for name, text in (("python3", PYTHON), ("df", DF), ("g++", "#!/bin/sh\n")):
            (self.programs / name).write_text(text)
            (self.programs / name).chmod(0o755)

    def make(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs make there; the log starts empty."""
        self.log.write_text("")
        fake = {"LOG": str(self.log), "REAL_PYTHON": sys.executable, "BEFORE": "", "FREE": "9000000", "PIP_SAYS": ""}
        env = {"PATH": str(self.programs), "HOME": os.environ.get("HOME", "/"), **fake, **environment}
        command = ["make", "--no-print-directory", *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, check=False, timeout=60
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """What make printed, less its own last line; it must have failed."""
    assert done.returncode != 0 and done.stdout == ""
    *lines, last = done.stderr.splitlines()
    assert last.startswith("make: ***"), done.stderr
    return "\n".join(lines)


def test_a_second_call_installs_and_prints_nothing(checkout: Checkout) -> None:
    first = checkout.make("setup")
    assert first.returncode == 0 and first.stdout.splitlines()[0].startswith("installing into .venv"), first.stderr
    assert checkout.log.read_text() == "pip install --quiet --editable .[test]\nrlneuron build\n"
    second = checkout.make("setup", PIP_SAYS="built: somewhere")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert checkout.log.read_text() == "rlneuron build\n"


def test_a_failed_installation_is_tried_again(checkout: Checkout) -> None:
    done = checkout.make("setup", FAILS="pip")
    assert done.returncode != 0 and "pip could not install the packages" in done.stderr
    assert checkout.log.read_text() == "pip install --quiet --editable .[test]\n"
    assert checkout.make("setup").returncode == 0
    assert checkout.log.read_text() == "pip install --quiet --editable .[test]\nrlneuron build\n"


def test_a_wrong_python_is_one_sentence(checkout: Checkout) -> None:
    done = checkout.make("train", BEFORE="import sys; sys.version_info = (3, 10, 12, 'final', 0)")
    assert refusal(done) == "rlneuron needs Python >= 3.11, this is 3.10; run: make PYTHON=python3.11 train"
    done = checkout.make("setup", "PYTHON=python3.99")
    assert refusal(done) == (
        "rlneuron needs Python >= 3.11, but there is no python3.99 here; "
        "install it or run: make PYTHON=/path/to/python setup"
    )


def test_a_python_without_venv_is_one_sentence(checkout: Checkout) -> None:
    done = checkout.make("setup", BEFORE="import sys; sys.modules['ensurepip'] = None")
    assert refusal(done).startswith("python3 lacks the venv module; install it (Debian: apt-get install python3-venv)")


def test_a_missing_compiler_is_one_sentence(checkout: Checkout) -> None:
    (checkout.programs / "g++").unlink()
    assert refusal(checkout.make("setup")) == (
        "rlneuron needs a C++ compiler; install g++ (Debian: apt-get install g++) and run make again."
    )


def test_a_full_disk_is_one_sentence(checkout: Checkout) -> None:
    message = refusal(checkout.make("setup", FREE="1000"))
    assert message == "rlneuron needs 4 GB of free disk here for its packages; 1000 are free."
    assert checkout.log.read_text() == "" and not (checkout.folder / ".venv").exists()
