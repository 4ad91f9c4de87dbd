"""The two models of the device and end-to-end benchmarks: S (~1M parameters) and M (~15M), Llama, random weights."""

from __future__ import annotations

from typing import Any

import torch

SPEC: dict[str, dict[str, Any]] = {
    "S": {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True,
    },
    "M": {
        "vocab_size": 4096, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True,
    },
}  # fmt: skip


def llama(name: str, seed: int = 0) -> torch.nn.Module:
    """The model `name` ("S" or "M") in fp32 on the CPU, the same weights for the same seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.02,
        **SPEC[name],
    )
    torch.manual_seed(seed)
    model: torch.nn.Module = LlamaForCausalLM(config).eval()
    return model
