"""Checkpoints: a resumed run equals the uninterrupted one bit for bit, and damage is named, never loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rlneuron.trainer import Learner, LearnerConfig, checkpoint
from tests.trainer import models


def learner(make: Any = models.llama, seed: int = 0, **overrides: Any) -> Learner:
    settings = {
        "per_device_train_batch_size": 6, "steps_per_generation": 2, "max_steps": 20, "warmup_steps": 10,
        "learning_rate": 3e-3, "lr_scheduler_type": "cosine", "weight_decay": 0.01,
    }  # fmt: skip
    return Learner(make(seed), LearnerConfig(**{**settings, **overrides}), models.DEVICE)


def train(trained: Learner, batches: range) -> list[dict[str, float]]:
    return [metrics for seed in batches for metrics in trained.update(models.batch(seed=seed, noise=0.1))]


def state(trained: Learner) -> dict[str, Tensor]:
    return {**checkpoint._optimizer_tensors(trained), **trained.model.state_dict()}


@pytest.mark.parametrize("make", [models.llama, models.qwen3, models.gpt2])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(make: Any, tmp_path: Path) -> None:
    whole, first = learner(make), learner(make)
    expected = train(whole, range(8))
    train(first, range(3))
    folder = checkpoint.save(tmp_path, first, extra_state={"data": {"epoch": 1, "position": 36}})
    after_save = torch.rand(3)

    resumed = learner(make, seed=5)
    assert checkpoint.load(folder, resumed) == {"data": {"epoch": 1, "position": 36}}
    assert torch.equal(torch.rand(3), after_save), "the random state was not restored"
    assert resumed.global_step == 6 == checkpoint.step_of(folder)
    assert train(resumed, range(3, 8)) == expected[6:]
    for name, tensor in state(whole).items():
        assert torch.equal(tensor, state(resumed)[name]), name


def test_from_pretrained_loads_model_and_tokenizer(tmp_path: Path) -> None:
    trained = learner()
    train(trained, range(1))
    words = WordLevel({f"w{i}": i for i in range(models.VOCAB)}, unk_token="w3")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="w2", unk_token="w3")
    folder = checkpoint.save(tmp_path, trained, tokenizer=tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert AutoTokenizer.from_pretrained(folder).eos_token == "w2"
    names = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "optimizer.safetensors", "rng.safetensors", "trainer_state.json"} <= names
    assert not [name for name in names if not name.endswith((".json", ".safetensors", ".jinja"))]


def test_a_learner_can_be_saved_before_its_first_step(tmp_path: Path) -> None:
    learner().save(tmp_path / "start")
    fresh = learner(seed=3)
    fresh.load(tmp_path / "start")
    assert train(fresh, range(1)) == train(learner(), range(1))


def make_folder(output_dir: Path, name: str, *, complete: bool = True) -> Path:
    folder = output_dir / name
    folder.mkdir(parents=True)
    (folder / "trainer_state.json" if complete else folder / "model.safetensors").write_text("{}")
    return folder


def test_order_is_numeric_and_only_complete_folders_count(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "absent") is None
    for name in ("checkpoint-900", "checkpoint-1000", "notes", "checkpoint-x", "checkpoint-5-old"):
        make_folder(tmp_path, name)
    make_folder(tmp_path, "checkpoint-2000", complete=False)
    (tmp_path / "checkpoint-3000").symlink_to(tmp_path / "notes")
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["checkpoint-900", "checkpoint-1000"]
    latest = checkpoint.latest(tmp_path)
    assert latest is not None and checkpoint.step_of(latest) == 1000
    make_folder(tmp_path / "wide", "checkpoint-0900000")
    make_folder(tmp_path / "wide", "checkpoint-100000")
    assert [checkpoint.step_of(path) for path in checkpoint.complete(tmp_path / "wide")] == [100000, 900000]
    with pytest.raises(ValueError, match="is not named checkpoint-<step>"):
        checkpoint.step_of(tmp_path / "notes")


@pytest.mark.parametrize(("limit", "left"), [(1, [1000]), (2, [900, 1000]), (0, [9, 900, 1000]), (-1, [9, 900, 1000])])
def test_rotation_keeps_the_newest_and_all_else(limit: int, left: list[int], tmp_path: Path) -> None:
    foreign = [make_folder(tmp_path, name) for name in ("notes", "checkpoint-old")]
    outside = make_folder(tmp_path.parent / f"{tmp_path.name}-outside", "checkpoint-1")
    (tmp_path / "checkpoint-1").symlink_to(outside)
    for name in ("checkpoint-9", "checkpoint-900"):
        make_folder(tmp_path, name)
    trained = learner()
    trained.global_step = 1000
    checkpoint.save(tmp_path, trained, save_total_limit=limit)
    assert [checkpoint.step_of(path) for path in checkpoint.complete(tmp_path)] == left
    assert all(path.exists() for path in (*foreign, outside, tmp_path / "checkpoint-1"))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_steps_of_an_abandoned_future_are_set_aside(tmp_path: Path) -> None:
    make_folder(tmp_path, "checkpoint-9000")
    trained = learner()
    trained.global_step = 100
    checkpoint.save(tmp_path, trained, save_total_limit=1)
    latest = checkpoint.latest(tmp_path)
    assert latest is not None and latest.name == "checkpoint-100"
    assert (tmp_path / "superseded-checkpoint-9000").is_dir()


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    trained = learner()
    checkpoint.save(tmp_path, trained, extra_state={"try": 1})
    folder = checkpoint.save(tmp_path, trained, extra_state={"try": 2})
    assert checkpoint.load(folder, learner()) == {"try": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-0"]


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = learner()
    folder = checkpoint.save(tmp_path, trained, extra_state={"try": 1})

    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", no_space)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, trained, extra_state={"try": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-0"]
    assert checkpoint.load(folder, learner()) == {"try": 1}


def test_a_link_in_the_place_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    target = make_folder(tmp_path / "elsewhere", "x")
    (tmp_path / "checkpoint-0").symlink_to(target)
    with pytest.raises(ValueError, match="checkpoint-0 is a link"):
        checkpoint.save(tmp_path, learner())
    assert sorted(path.name for path in target.iterdir()) == ["trainer_state.json"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "config.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_file_is_named_and_nothing_is_loaded(name: str, damage: str, tmp_path: Path) -> None:
    trained = learner()
    train(trained, range(1))
    path = checkpoint.save(tmp_path, trained) / name
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes(data) if damage == "flipped" else bytes(data[:-7]))
    target = learner(seed=1)
    before = {key: value.clone() for key, value in state(target).items()}
    with pytest.raises(ValueError, match=name):
        checkpoint.load(path.parent, target)
    assert all(torch.equal(value, before[key]) for key, value in state(target).items()) and target.global_step == 0


def test_a_damaged_state_file_is_named(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, learner())
    path = folder / "trainer_state.json"
    content = json.loads(path.read_text())
    for text, message in (
        (path.read_text()[:50], "is missing or damaged"),
        (json.dumps({**content, "format": 99}), "has format 99, this version reads 1"),
        (json.dumps({"format": 1}), "lacks"),
        (json.dumps({**content, "files": {"../../etc/passwd": {"bytes": 1, "sha256": ""}}}), "no plain file"),
        (json.dumps({**content, "files": {}}), "does not list optimizer.safetensors"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            checkpoint.load(folder, learner())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, learner())
    for change in ({"tie_word_embeddings": False}, {"num_hidden_layers": 1}, {"intermediate_size": 64}):
        with pytest.raises(ValueError, match="holds another model, or one tied otherwise"):
            checkpoint.load(folder, learner(lambda seed, change=change: models.llama(seed, **change)))


def test_no_pickle_is_ever_read(tmp_path: Path) -> None:
    """A pickle that would create a file, in the place of each safetensors file and beside them, is not run."""
    marker = tmp_path / "marker"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(marker),)

    folder = checkpoint.save(tmp_path, learner())
    for name in ("pytorch_model.bin", "optimizer.pt", "rng_state.pth"):
        torch.save(Bomb(), folder / name)
    checkpoint.load(folder, learner())
    for name in ("model.safetensors", "optimizer.safetensors", "rng.safetensors"):
        torch.save(Bomb(), folder / name)
        with pytest.raises(ValueError, match="is damaged"):
            checkpoint.load(folder, learner())
    assert not marker.exists()
