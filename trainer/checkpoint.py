"""Checkpoints: `checkpoint-<step>` folders of safetensors and JSON, written whole or not at all. Never pickle.

A folder holds what `save_pretrained` writes (so `from_pretrained` loads it), the tokenizer, `optimizer.safetensors`,
`rng.safetensors` and `trainer_state.json` (step, the caller's own state, and size and SHA-256 of every other file).
It is made under another name, synced and renamed. It does not decide when to save or where to resume.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlneuron.device import host_copy

if TYPE_CHECKING:
    from rlneuron.trainer.learner import Learner

STATE_FILE = "trainer_state.json"
FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d{1,18})")
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def step_of(folder: Path | str) -> int:
    """The optimizer step in a checkpoint folder's name. ValueError if it is not `checkpoint-<step>`."""
    match = _NAME.fullmatch(Path(folder).name)
    if match is None:
        raise ValueError(f"{folder} is not named checkpoint-<step>.")
    return int(match[1])


def complete(output_dir: Path | str) -> list[Path]:
    """Complete checkpoints below `output_dir`, by step as a number. Links and folders of other names are not ours."""
    output_dir = Path(output_dir)
    if not output_dir.is_dir():
        return []
    found = [
        path
        for path in output_dir.iterdir()
        if _NAME.fullmatch(path.name) and not path.is_symlink() and (path / STATE_FILE).is_file()
    ]
    return sorted(found, key=step_of)


def latest(output_dir: Path | str) -> Path | None:
    """The checkpoint of the highest step, or None."""
    found = complete(output_dir)
    return found[-1] if found else None


def save(
    output_dir: Path | str,
    learner: Learner,
    *,
    tokenizer: Any = None,
    extra_state: Mapping[str, Any] | None = None,
    save_total_limit: int | None = None,
) -> Path:
    """Writes `output_dir/checkpoint-<step>` and removes the oldest beyond `save_total_limit` (None or < 1: keeps all).

    A checkpoint of this step is replaced. Checkpoints of higher steps belong to a future that resuming abandoned;
    they are renamed `superseded-checkpoint-<step>`, so that they are neither resumed from nor lost.
    """
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    target = output_dir / f"checkpoint-{learner.global_step}"
    if target.is_symlink():
        raise ValueError(f"{target} is a link; checkpoints are written to real folders only.")
    making = output_dir / f".making-{target.name}-{os.getpid()}"
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    try:
        save_training_state(learner, making, tokenizer=tokenizer, extra_state=extra_state)
        _sync(making)
        _put_in_place(making, target)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    for path in complete(output_dir):
        if step_of(path) > learner.global_step:
            _put_in_place(path, path.with_name(f"superseded-{path.name}"))
    if save_total_limit is not None and save_total_limit >= 1:
        for path in complete(output_dir)[:-save_total_limit]:
            shutil.rmtree(path)
    return target


def load(folder: Path | str, learner: Learner) -> dict[str, Any]:
    """Restores `learner` from a checkpoint folder; returns the `extra_state` it was saved with."""
    return load_training_state(learner, Path(folder))


def save_training_state(
    learner: Learner, folder: Path, *, tokenizer: Any = None, extra_state: Mapping[str, Any] | None = None
) -> None:
    """Writes the files of a checkpoint into `folder` (made if absent), the state file last."""
    folder.mkdir(parents=True, exist_ok=True)
    with host_copy():
        learner.model.save_pretrained(folder, state_dict=_host_state_dict(learner.model))
        save_file(_optimizer_tensors(learner), folder / "optimizer.safetensors")
        save_file(_rng_states(learner.device), folder / "rng.safetensors")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != STATE_FILE)
    state = {
        "format": FORMAT,
        "global_step": learner.global_step,
        "num_batches": learner.num_batches,
        "seed": learner.config.seed,
        "extra_state": dict(extra_state or {}),
        "files": {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files},
    }
    (folder / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")


def load_training_state(learner: Learner, folder: Path) -> dict[str, Any]:
    """Restores what `save_training_state` wrote, bit for bit. ValueError names the file that is damaged or differs."""
    state = _read_state(folder)
    _check_files(folder, state["files"])
    weights, moments = _read_model(learner, folder), _read_optimizer(learner, folder)
    rng = _tensors(folder / "rng.safetensors")
    with torch.no_grad():
        for name, tensor in learner.model.state_dict().items():
            tensor.copy_(weights[name])
    learner.optimizer.state.clear()
    for name, values in moments.items():
        learner.optimizer.state[learner.parameters[name]] = {k: x.to(learner.device) for k, x in values.items()}
    torch.set_rng_state(rng["cpu"])
    if learner.device.type in rng and learner.device.type != "cpu":
        torch.get_device_module(learner.device).set_rng_state(rng[learner.device.type], learner.device)
    learner.global_step, learner.num_batches = int(state["global_step"]), int(state["num_batches"])
    extra_state: dict[str, Any] = state["extra_state"]
    return extra_state


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE_FILE
    try:
        state: dict[str, Any] = json.loads(path.read_text())
        if state["format"] != FORMAT:
            raise ValueError(f"{path} has format {state['format']}, this version reads {FORMAT}.")
        if missing := {"global_step", "num_batches", "extra_state", "files"} - set(state):
            raise ValueError(f"{path} lacks {sorted(missing)}.")
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is missing or damaged, so {folder} cannot be resumed from: {error!r}") from error
    return state


def _check_files(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    for name, wanted in files.items():
        path = folder / name
        if Path(name).name != name or path.is_symlink() or not path.is_file():
            raise ValueError(f"{path} is missing, or no plain file in its checkpoint.")
        if path.stat().st_size != wanted["bytes"] or _sha256(path) != wanted["sha256"]:
            raise ValueError(f"{path} is damaged: it is not the file that was saved. Resume from another checkpoint.")
    for name in ("optimizer.safetensors", "rng.safetensors"):
        if name not in files:
            raise ValueError(f"{folder / STATE_FILE} does not list {name}.")


def _read_model(learner: Learner, folder: Path) -> dict[str, Tensor]:
    """The folder's weights on the CPU, after checking that they are those of the learner's kind of model."""
    loaded, info = type(learner.model).from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, local_files_only=True, output_loading_info=True
    )
    differences = {key: sorted(map(str, value))[:3] for key, value in info.items() if value}
    if differences:
        raise ValueError(f"the weights in {folder} are not this model's: {differences}.")
    shapes = [{name: list(p.shape) for name, p in model.named_parameters()} for model in (loaded, learner.model)]
    if shapes[0] != shapes[1]:
        different = sorted(name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name))
        raise ValueError(f"{folder} holds another model, or one tied otherwise: {different[:3]} differ.")
    return dict(loaded.state_dict())


def _host_state_dict(model: Any) -> dict[str, Tensor]:
    """The state dict on the CPU; tensors that share memory on the device share it there too."""
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    return {
        name: copies.setdefault((x.data_ptr(), x.shape), x.detach().cpu()) for name, x in model.state_dict().items()
    }


def _optimizer_tensors(learner: Learner) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in learner.parameters.items():
        for kind, value in learner.optimizer.state.get(parameter, {}).items():
            assert kind in _MOMENTS, kind
            tensors[f"{kind}.{name}"] = value.detach().cpu().contiguous()
    return tensors


def _read_optimizer(learner: Learner, folder: Path) -> dict[str, dict[str, Tensor]]:
    """The moments of each parameter on the CPU; none if no step had been taken."""
    path = folder / "optimizer.safetensors"
    tensors = _tensors(path)
    wanted = {f"{kind}.{name}" for name in learner.parameters for kind in _MOMENTS}
    if tensors and set(tensors) != wanted:
        raise ValueError(f"{path} is not this model's: {sorted(set(tensors) ^ wanted)[:3]} differ.")
    moments = {}
    for name, parameter in learner.parameters.items() if tensors else ():
        moments[name] = {kind: tensors[f"{kind}.{name}"] for kind in _MOMENTS}
        if any(moments[name][kind].shape != parameter.shape for kind in ("exp_avg", "exp_avg_sq")):
            raise ValueError(f"{path}: the moments of {name} are not {list(parameter.shape)}.")
    return moments


def _rng_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """Forces the files of `folder`, and the folder, to disk."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(folder: Path, target: Path) -> None:
    """Renames `folder` to `target`; an older `target` is moved away first and then removed."""
    old = target.with_name(f".old-{target.name}-{os.getpid()}")
    if target.exists():
        target.rename(old)
    folder.rename(target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    shutil.rmtree(old, ignore_errors=True)
