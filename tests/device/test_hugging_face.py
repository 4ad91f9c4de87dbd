"""Tiny Hugging Face decoders: loss, gradients and generated tokens on neuron are bitwise those of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 97


def llama_settings() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    }  # fmt: skip


def make(name: str) -> Any:
    """A random model of under 100,000 parameters; the same weights each time."""
    torch.manual_seed(0)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**llama_settings(), tie_word_embeddings=True))
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**llama_settings(), head_dim=8))
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def padded_batch(device: str) -> dict[str, torch.Tensor]:
    tokens = torch.randint(2, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    return {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_loss_gradients_and_generation_equal_the_cpu(neuron: torch.device, name: str) -> None:
    results: dict[str, Any] = {}
    for device in ("cpu", "neuron"):
        model, batch = make(name).to(device).train(), padded_batch(device)
        torch.manual_seed(1)  # GPT-2 has dropout
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        gradients = {key: parameter.grad.cpu() for key, parameter in model.named_parameters()}
        model.eval()
        torch.manual_seed(2)
        greedy = model.generate(**batch, max_new_tokens=10, do_sample=False)
        sampled = model.generate(**batch, max_new_tokens=10, do_sample=True, top_k=20)
        assert greedy.device.type == device
        results[device] = (loss.item(), gradients, greedy.tolist(), sampled.tolist())
    cpu, ours = results["cpu"], results["neuron"]
    assert ours[0] == cpu[0]
    torch.testing.assert_close(ours[1], cpu[1], rtol=1e-6, atol=1e-7)
    assert ours[2] == cpu[2]
    assert ours[3] == cpu[3]


def test_bf16_and_static_cache(neuron: torch.device) -> None:
    tokens = {}
    for device in ("cpu", "neuron"):
        model = make("llama").to(device, torch.bfloat16).eval()
        out = model.generate(
            **padded_batch(device),
            max_new_tokens=6,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,
        )
        tokens[device] = out.tolist()
    assert tokens["cpu"] == tokens["neuron"]


def test_from_pretrained_with_device_map(neuron: torch.device, tmp_path: Any) -> None:
    make("llama").save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, device_map="neuron")
    assert model.device == neuron
    assert torch.equal(model.lm_head.weight.cpu(), make("llama").lm_head.weight)


def test_accelerate_and_transformers_find_the_device(neuron: torch.device) -> None:
    from accelerate import Accelerator
    from transformers.utils import is_torch_neuron_available  # type: ignore[attr-defined]

    assert is_torch_neuron_available()
    assert Accelerator().device.type == "neuron"
