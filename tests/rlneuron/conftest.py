"""One Ray cluster of four simulated cores for all tests of the run, started in a process of its own on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVER = """
import json, sys
import ray
from pathlib import Path
from rlneuron import cluster
folder = Path(sys.argv[1])
started = cluster.start(run_folder=folder, resources={"neuron_cores": 4}, include_dashboard=False, namespace="tests")
print(json.dumps({"address": started.address, "token_path": str(started.token_path)}), flush=True)
sys.stdin.read()  # until the tests end
ray.shutdown()
"""


@pytest.fixture(scope="session")
def ray_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the shared cluster; this process authenticates with its token."""
    folder = tmp_path_factory.mktemp("ray")
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None and server.stdout is not None
    answer = json.loads(server.stdout.readline())
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=answer["token_path"])
    yield answer["address"]
    server.stdin.close()
    server.wait(timeout=60)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the tiny model, prompts and rewards."""
    from tests.rlneuron.tiny_run import write_files

    folder = tmp_path_factory.mktemp("tiny")
    write_files(folder)
    return folder
