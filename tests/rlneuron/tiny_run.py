"""A run small enough for tests: a random Llama of 30k parameters, arithmetic prompts in a JSONL file, real actors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz"
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"

REWARDS = '''
"""Rewards for tests."""
import os
import signal


def digits(completions, **kwargs):
    """Share of digits: varies within a group and can be learned."""
    return [sum(ch.isdigit() for ch in text) / max(len(text), 1) for text in completions]


def raises_on_three(completions, **kwargs):
    if len(completions) > 1:
        raise RuntimeError("no")
    return [1.0]


def too_few(completions, **kwargs):
    return [1.0]


def nan(completions, **kwargs):
    return [float("nan")] * len(completions)


def kills_itself(completions, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def slow(completions, **kwargs):
    import time

    time.sleep(0.3)
    return digits(completions)
'''


def tokenizer() -> PreTrainedTokenizerFast:
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    vocab = {token: index for index, token in enumerate([*special, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<|pad|>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|pad|>", eos_token="<|end|>", padding_side="left", chat_template=TEMPLATE
    )
    made.add_special_tokens({"additional_special_tokens": special[2:]})
    return made


def write_files(folder: Path) -> None:
    """`folder`/model, /prompts.jsonl and /rewards.py."""
    made = tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(made),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=made.eos_token_id,
        pad_token_id=made.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    made.save_pretrained(folder / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        result[key] = merged(result.get(key, {}), value) if isinstance(value, Mapping) else value
    return result


def write_config(folder: Path, name: str, changes: Mapping[str, Any] | None = None) -> Path:
    """`folder`/`name`.yaml; the run goes to `folder`/`name`. `changes` are merged over the defaults of tests."""
    settings: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "prompts.jsonl"), "eval": {"size": 8}},
        "reward": {"funcs": [f"{folder / 'rewards.py'}:digits"]},
        "rollout": {"num_generations": 4, "max_completion_length": 12, "num_workers": 2},
        "device": {"type": "neuron", "instance": "trn2.3xlarge", "simulate": "auto"},
        "train": {
            "output_dir": str(folder / name),
            "max_steps": 3,
            "learning_rate": 3e-3,
            "lr_scheduler_type": "constant",
            "per_device_train_batch_size": 16,
            "save_steps": 2,
            "seed": 0,
        },
        "logging": {"logging_steps": 1, "report_to": "none", "log_completions": True},
        "ray": {"dashboard": False},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(merged(settings, changes or {})))  # JSON is YAML
    return path


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
