"""Looking at a running run from outside: Ray's dashboard, the exported metrics, and who may ask."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.rlneuron.test_run import start_process
from tests.rlneuron.tiny_run import write_config


@dataclass(frozen=True)
class Running:
    """A run that is under way."""

    process: subprocess.Popen[str]
    url: str
    token: str


@pytest.fixture(scope="module")
def running(tiny: Path) -> Iterator[Running]:
    changes = {
        "train": {"max_steps": 500, "save_steps": 1000},
        "reward": {"funcs": [f"{tiny / 'rewards.py'}:slow"]},
        "ray": {"dashboard": True},
    }
    process = start_process(write_config(tiny, "watched", changes))
    assert process.stdout is not None
    url = ""
    for line in process.stdout:
        if line.startswith("dashboard:"):
            url = re.findall(r"http://[\d.]+:\d+", line)[0]
        if line.startswith("step 12/"):  # by then the metrics of the first steps have reached Ray's agent
            break
    assert process.poll() is None
    yield Running(process, url, (tiny / "watched" / "ray_token").read_text())
    os.kill(process.pid, signal.SIGINT)
    process.stdout.read()
    assert process.wait(timeout=60) == 130


def get(url: str, token: str | None = None) -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5) as answer:
        return str(answer.read().decode())


def listeners(process: subprocess.Popen[str]) -> set[tuple[str, int]]:
    """(address, port) that the run's processes listen at."""
    found = set()
    for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        found |= {(c.laddr.ip, c.laddr.port) for c in one.net_connections(kind="inet") if c.status == "LISTEN"}
    return found


def test_actors_have_readable_names(running: Running) -> None:
    actors = json.loads(get(f"{running.url}/logical/actors", running.token))["data"]["actors"].values()
    assert {actor["name"]: actor["reprName"] for actor in actors} == {
        "learner": "Learner(rank=0, core 0)",
        "rollout-0": "Rollout(rank=0, core 1)",
        "rollout-1": "Rollout(rank=1, core 2)",
        "reward-0": "Reward(rank=0)",
    }


def test_without_the_token_there_is_no_answer(running: Running) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        get(f"{running.url}/logical/actors")


def test_everything_listens_on_loopback_only(running: Running) -> None:
    found = listeners(running.process)
    assert len(found) > 5
    assert {address for address, _ in found} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def exported(process: subprocess.Popen[str]) -> dict[str, float]:
    """Our metrics at whichever port serves them."""
    found: dict[str, float] = {}
    for _, port in listeners(process):
        try:
            text = get(f"http://127.0.0.1:{port}/metrics")
        except (OSError, ValueError, http.client.HTTPException):
            continue  # a port that does not speak HTTP
        for name, value in re.findall(r'^ray_(rlneuron_\w+)\{[^}]*run="watched"[^}]*\} (\S+)$', text, re.MULTILINE):
            found[name] = float(value)
    return found


def test_the_main_metrics_are_exported(running: Running) -> None:
    wanted = {"rlneuron_reward", "rlneuron_loss", "rlneuron_entropy", "rlneuron_wall_step_s"}
    deadline = time.monotonic() + 60  # Ray hands metrics to its agent every ten seconds
    found = exported(running.process)
    while not wanted <= set(found) and time.monotonic() < deadline:
        time.sleep(1)
        found = exported(running.process)
    assert wanted <= set(found)
    assert 0 <= found["rlneuron_reward"] <= 1 and found["rlneuron_wall_step_s"] > 0
