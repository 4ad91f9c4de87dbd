"""The model folder, prompts and reward that both sides of end_to_end.py use."""

from __future__ import annotations

import json
import random
from pathlib import Path

from models import SPEC, llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PROMPTS, SAMPLES, MAX_NEW_TOKENS = 16, 8, 256
LEARNING_RATE = 1e-5


def tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    vocab = {"<eos>": 0, "<unk>": 1, **{f"t{i}": i for i in range(2, vocab_size)}}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def write_model_and_prompts(folder: Path, name: str, *, num_steps: int) -> None:
    """`folder`/model (random weights, seed 0) and `folder`/prompts.jsonl: 16 prompts of 32..128 tokens per step."""
    model = llama(name, seed=0)
    model.config.eos_token_id = 0
    model.generation_config.eos_token_id = 0
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder / "model")
    tokenizer(SPEC[name]["vocab_size"]).save_pretrained(folder / "model")
    rng = random.Random(0)
    vocab_size = SPEC[name]["vocab_size"]
    rows = [
        {"prompt": " ".join(f"t{rng.randint(2, vocab_size - 1)}" for _ in range(rng.randint(32, 128)))}
        for _ in range(PROMPTS * num_steps)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def reward(completion_ids: list[list[int]], **kwargs: object) -> list[float]:
    """Varies within a group and costs nothing."""
    return [float(sum(ids) % 7) for ids in completion_ids]
