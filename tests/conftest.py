"""What all tests share: one thread, no network, and the list of tests that could not run."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path

# Before torch, transformers and Ray are imported by any test.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.pop("RLNEURON_SIM", None)

import pytest
import torch

torch.set_num_threads(1)

EXPECTED_NOT_RUN = Path(__file__).with_name("not_run.json")
"""Test ids that may be NOT RUN on CI: it fails when the list grows."""

_not_run: dict[str, str] = {}


@pytest.fixture(scope="session", autouse=True)
def _neuron_is_active() -> None:
    """The simulated device, before the first backward: autograd makes its queues for the devices it finds then."""
    from rlneuron.device import select

    select.choose("neuron", simulate=True)


def _is_present(tool: str) -> bool:
    """`tool` is a program on PATH or an importable package."""
    return shutil.which(tool) is not None or importlib.util.find_spec(tool) is not None


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for tool in mark.args:
            if not _is_present(tool):
                _not_run[item.nodeid] = tool
                pytest.skip(f"NOT RUN: needs {tool}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _not_run:
        terminalreporter.section("NOT RUN (a tool is missing)")
        for test, tool in sorted(_not_run.items()):
            terminalreporter.write_line(f"NOT RUN {test}: needs {tool}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    new = set(_not_run) - set(json.loads(EXPECTED_NOT_RUN.read_text()))
    if new and os.environ.get("CI"):
        print(f"\nNOT RUN grew by {sorted(new)}; install the tool or add the test to {EXPECTED_NOT_RUN.name}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
