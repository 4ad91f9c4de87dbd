"""Saving, loading, copying and pickling neuron tensors."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import torch


def test_save_and_load_with_map_location(neuron: torch.device, tmp_path: Path) -> None:
    base = torch.arange(6.0, device=neuron)
    path = tmp_path / "x.pt"
    torch.save({"base": base, "view": base[2:], "other": torch.ones(1, device="neuron:1")}, path)
    assert b"neuron:0" in path.read_bytes() and b"privateuse" not in path.read_bytes()
    for location, expected in ((None, "neuron:0"), ("cpu", "cpu"), ("neuron:1", "neuron:1"), ("neuron", "neuron:0")):
        loaded = torch.load(path, map_location=location, weights_only=True)
        assert str(loaded["base"].device) == expected
        assert loaded["view"].tolist() == [2, 3, 4, 5]
        loaded["base"][2] = 9
        assert loaded["view"][0].item() == 9, "sharing is kept"
    assert torch.load(path)["other"].device.index == 1
    assert torch.load(path, mmap=True)["base"].tolist() == base.tolist()


def test_a_process_without_the_device_can_load(neuron: torch.device, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(torch.arange(3.0, device=neuron), path)
    program = f"import torch; print(torch.load({str(path)!r}, map_location='cpu', weights_only=True).tolist())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[0.0, 1.0, 2.0]"


def test_optimizer_state_round_trip(neuron: torch.device) -> None:
    net = torch.nn.Linear(3, 3).to(neuron)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3, device=neuron)).sum().backward()
    optimizer.step()
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    other = torch.optim.AdamW(net.parameters())
    other.load_state_dict(torch.load(buffer))
    assert other.state[net.weight]["exp_avg"].device == neuron
    assert torch.equal(other.state[net.weight]["exp_avg"], optimizer.state[net.weight]["exp_avg"])


def test_copies_and_pickles(neuron: torch.device) -> None:
    x = torch.randn(4, device=neuron)
    for other in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), copy.deepcopy({"a": x})["a"]):
        assert other.device == neuron and torch.equal(other, x)
        assert other.data_ptr() != x.data_ptr()
    net = copy.deepcopy(torch.nn.Linear(2, 2).to(neuron))
    assert net.weight.device == neuron


def test_safetensors(neuron: torch.device, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    x = torch.randn(4, 2, device=neuron)
    save_file({"x": x}, tmp_path / "x.safetensors")
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"].to(neuron), x)


def test_repr_and_numpy(neuron: torch.device) -> None:
    assert "device='neuron:0'" in repr(torch.ones(2, device=neuron))
    assert torch.ones(2, device=neuron).cpu().numpy().tolist() == [1, 1]
