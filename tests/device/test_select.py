"""The choice of hardware, its errors, visible cores, processes, and the autoload entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlneuron.device import autoload, instances, runtime, select


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python program in a process of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=env, timeout=120
    )


def test_neuron_is_simulated_and_says_so(neuron: torch.device) -> None:
    chosen = select.choose("neuron")
    assert chosen.simulated and chosen.device == neuron and chosen.num_cores == 4
    assert chosen.description.startswith("SIMULATED trn2.3xlarge")
    assert chosen == select.describe("neuron")


def test_cpu_and_cuda() -> None:
    assert select.choose("cpu").device == torch.device("cpu")
    assert not select.choose("cpu").simulated
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="cuda"):
            select.choose("cuda")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"type": "tpu"}, "device.type.*tpu.*neuron"),
        ({"type": "neuron", "instance": "trn2.3xlrge"}, "trn2.3xlarge"),
        ({"type": "neuron", "instance": "trn1.2xlarge"}, "already simulates"),
        ({"type": "neuron", "simulate": "maybe"}, "simulate.*maybe"),
        ({"type": "neuron", "simulate": False}, "lacks"),
        ({"type": "neuron", "hbm_gib": 25.0}, "hbm_gib.*24"),
        ({"type": "neuron", "hbm_gib": 0.0}, "hbm_gib"),
        ({"type": "neuron", "numerics": "strict"}, "numerics.*exact"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select.choose(**arguments)


def test_describe_knows_other_instances_without_activating() -> None:
    assert select.describe("neuron", "trn2.48xlarge").num_cores == 64
    assert select.describe("neuron", "trn1.2xlarge", hbm_gib=1.5).description.endswith("1.5 GiB HBM each")
    assert runtime.settings().instance == "trn2.3xlarge"


@pytest.mark.parametrize(
    ("text", "cores"),
    [(None, [0, 1, 2, 3]), ("", [0, 1, 2, 3]), ("0,1", [0, 1]), ("1-3", [1, 2, 3]), ("0,2-3", [0, 2, 3])],
)
def test_visible_cores(text: str | None, cores: list[int]) -> None:
    assert instances.visible_cores(text, 4) == cores


@pytest.mark.parametrize("text", ["a", "3-1", "0,0", "4", "-1", "0-"])
def test_bad_visible_cores_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="NEURON_RT_VISIBLE_CORES"):
        instances.visible_cores(text, 4)


def test_two_processes_see_their_cores() -> None:
    program = (
        "import torch; from rlneuron.device import select\n"
        "h = select.choose('neuron', 'trn2.3xlarge', True, hbm_gib=1)\n"
        "x = torch.ones(2, device='neuron:1')\n"
        "print(h.num_cores, torch.neuron.device_count(), torch.neuron.mem_get_info()[1], x.sum().item())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "NEURON_RT_VISIBLE_CORES": cores},
        )
        for cores in ("0,1", "1-3")
    ]
    assert [process.communicate(timeout=120)[0].split() for process in running] == [
        ["2", "2", str(2**30), "2.0"],
        ["3", "3", str(2**30), "2.0"],
    ]


def test_autoload_acts_only_when_asked() -> None:
    program = (
        "import sys; from rlneuron.device import autoload; autoload.autoload()\n"
        "print('torch' in sys.modules, [m for m in sys.modules if m.startswith('rlneuron')])"
    )
    assert run(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout.split(maxsplit=1) == [
        "False",
        "['rlneuron', 'rlneuron.device', 'rlneuron.device.autoload']\n",
    ]
    program = (
        "import torch; from rlneuron.device import autoload; autoload.autoload()\n"
        "print(torch.accelerator.current_accelerator(), torch.neuron.get_device_properties().total_memory)"
    )
    done = run(program, RLNEURON_SIM="trn1.2xlarge,hbm_gib=2", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.split() == ["neuron", str(2 * 2**30)]


def test_import_torch_activates_an_unmodified_program(tmp_path: Path) -> None:
    info = tmp_path / "autoloadtest-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: autoloadtest\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nautoloadtest = rlneuron.device.autoload:autoload\n")
    program = "import torch; print(torch.accelerator.current_accelerator(), torch.ones(2).to('neuron').sum().item())"
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    assert run(program, PYTHONPATH=path, RLNEURON_SIM="trn2.3xlarge").stdout.split() == ["neuron", "2.0"]
    done = run(program, PYTHONPATH=path, RLNEURON_SIM="trn2.3xlrge")
    assert "write 'trn2.3xlarge'" in done.stderr, "a mistake is said"
    done = run("import torch; print(torch.accelerator.current_accelerator())", PYTHONPATH=path, RLNEURON_SIM="")
    assert done.stdout.strip() == "None"


def test_autoload_never_raises(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("trn9", "trn2.3xlarge,speed=2", "trn2.3xlarge,hbm_gib=much"):
        monkeypatch.setenv("RLNEURON_SIM", text)
        autoload.autoload()
        assert f"RLNEURON_SIM={text}" in capsys.readouterr().err


def test_forked_children_are_refused_with_advice() -> None:
    program = (
        "import os, sys, torch; from rlneuron.device import select\n"
        "select.choose('neuron', simulate=True)\n"
        "def child(text):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        try:\n"
        "            torch.ones(1, device='neuron'); print(text, 'fine', flush=True)\n"
        "        except RuntimeError as error:\n"
        "            print(text, error, flush=True)\n"
        "        os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "child('unused')\n"
        "torch.ones(1, device='neuron')\n"
        "child('used')\n"
        "print('parent', torch.ones(1, device='neuron').item())\n"
    )
    lines = run(program).stdout.splitlines()
    assert lines[0] == "unused fine"
    assert lines[1].startswith("used") and "spawn" in lines[1]
    assert lines[2] == "parent 1.0"


def test_streams_and_events(neuron: torch.device) -> None:
    stream = torch.neuron.Stream()
    with torch.neuron.stream(stream):
        assert torch.neuron.current_stream() == stream
        start = torch.neuron.Event(enable_timing=True)
        start.record()
    assert torch.neuron.current_stream() == torch.neuron.default_stream()
    end = torch.Event(neuron, enable_timing=True)
    end.record()
    end.synchronize()
    assert start.query() and end.query() and stream.query()
    with pytest.raises(RuntimeError, match="no cost model"):
        start.elapsed_time(end)
    with torch.neuron.device(2):
        assert torch.ones(1, device="neuron").device.index == 2
    assert torch.neuron.current_device() == 0
    torch.accelerator.synchronize()
