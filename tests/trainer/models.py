"""Tiny random models and batches for the learner's tests."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rlneuron.trainer.batch import TrainBatch

VOCAB = 61
DEVICE = torch.device("cpu")


def llama(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True,
        "initializer_range": 0.2, "max_position_embeddings": 128, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**settings, **overrides}))


def qwen3(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=1, head_dim=16, tie_word_embeddings=False, initializer_range=0.2,
        )
    )  # fmt: skip


def gpt2(seed: int = 0, dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2,
            attn_pdrop=dropout, resid_pdrop=dropout, embd_pdrop=dropout, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def batch(
    num_prompts: int = 3, group: int = 4, seed: int = 0, longest: int = 9, *, noise: float = 0.0, ref: bool = False
) -> TrainBatch:
    """Random prompts with `group` completions each; sampling log-probabilities only with `noise`, and see `ref`."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, VOCAB) for _ in range(draw.randint(1, 6))] for _ in range(num_prompts)]
    completions = [
        [draw.randrange(3, VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(num_prompts * group)
    ]
    fake = lambda scale: [[-3.0 + draw.gauss(0, scale) for _ in c] for c in completions]  # noqa: E731
    return TrainBatch(
        prompt_ids=[prompts[i // group] for i in range(num_prompts * group)],
        completion_ids=completions,
        advantages=torch.tensor([draw.gauss(0, 1) for _ in completions]),
        truncated=[draw.random() < 0.3 for _ in completions],
        sampling_logprobs=fake(noise) if noise else None,
        ref_logprobs=fake(0.5) if ref else None,
    )


def own_logprobs(model: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> torch.Tensor:
    """The completion's log-probabilities by the model's own forward on this row alone [len(completion)]."""
    ids = torch.tensor([prompt + completion])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
