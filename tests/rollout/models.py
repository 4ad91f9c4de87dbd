"""Tiny random decoders of several architectures, a tokenizer, and Hugging Face's answers to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 97
EOS = 2
# Weights wide enough that the largest logit does not hang on the last bit, not so wide that rounding grows.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.1, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def _gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.1,
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


BUILDERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**COMMON)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**COMMON)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**COMMON, head_dim=32)),
    "gpt2": _gpt2,
    "mistral": lambda: MistralForCausalLM(MistralConfig(**COMMON, sliding_window=8)),
    # Soft-capped attention and logits, alternating windows; only eager attention caps its scores.
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**COMMON, head_dim=16, sliding_window=8, attn_implementation="eager")
    ),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**COMMON, head_dim=16, sliding_window=8)),
    "phi": lambda: PhiForCausalLM(PhiConfig(**{**COMMON, "num_key_value_heads": 4})),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**COMMON)),
}


def build(name: str = "llama", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return BUILDERS[name]().eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """Words w0 .. w96; w2 is the end."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w1{% endif %}"
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", unk_token="w0", chat_template=template)


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=draw).tolist() for n in lengths]


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """`generate` on one prompt alone."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def teacher_forced(model: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of every completion token by one forward pass of the whole sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
