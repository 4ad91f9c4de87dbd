"""Packed log-probabilities are those of the unmodified model on each row alone; what cannot be so is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from rlneuron.trainer import Learner, LearnerConfig, Reference
from rlneuron.trainer.packed_model import PackedModel
from tests.trainer import models


def config(**overrides: Any) -> LearnerConfig:
    settings = {"per_device_train_batch_size": 12, "max_steps": 10, "temperature": 0.7, "tokens_per_micro_batch": 40}
    return LearnerConfig(**{**settings, **overrides})


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("make", [models.llama, models.qwen3, models.gpt2])
def test_equals_the_models_own_forward(make: Any, share_prompts: bool) -> None:
    batch = models.batch(longest=30)
    learner = Learner(make(), config(share_prompts=share_prompts), models.DEVICE)
    theirs = [
        models.own_logprobs(make(), prompt, completion, 0.7)
        for prompt, completion in zip(batch.prompt_ids, batch.completion_ids, strict=True)
    ]
    for got, wanted in zip(learner.logprobs(batch), theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=5e-6)
    reference = Reference(make(), 0.7, models.DEVICE, tokens_per_micro_batch=33)
    for row, wanted in zip(reference.logprobs(batch), theirs, strict=True):
        torch.testing.assert_close(torch.tensor(row), wanted.detach(), rtol=1e-6, atol=5e-6)


def test_short_prompts_do_not_feel_long_neighbours() -> None:
    for make in (models.llama, models.gpt2):
        prompts, completion = [[5, 6, 7], list(range(3, 43))], [9, 8, 7]
        batch = models.batch(num_prompts=2, group=1)
        batch.prompt_ids, batch.completion_ids = prompts, [completion, completion]
        together = Reference(make(), 1.0, models.DEVICE).logprobs(batch)
        for prompt, row in zip(prompts, together, strict=True):
            torch.testing.assert_close(
                torch.tensor(row), models.own_logprobs(make(), prompt, completion).detach(), rtol=1e-5, atol=1e-5
            )


def test_the_model_keeps_its_own_attention_outside() -> None:
    model = models.llama()
    before = model.config._attn_implementation
    Learner(model, config(), models.DEVICE).logprobs(models.batch())
    assert model.config._attn_implementation == before
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, models.VOCAB)


def test_dropout_is_refused_until_it_is_disabled() -> None:
    with pytest.raises(ValueError, match=r"e.g. transformer.drop \(0.1\).* disable_dropout: true"):
        Learner(models.gpt2(dropout=0.1), config(), models.DEVICE)
    with pytest.raises(ValueError, match="self_attn"):
        Learner(models.llama(attention_dropout=0.1), config(), models.DEVICE)
    batch = models.batch()
    for make in (lambda: models.gpt2(dropout=0.1), lambda: models.llama(attention_dropout=0.1)):
        learner = Learner(make(), config(disable_dropout=True), models.DEVICE)
        assert learner.model.training
        again = [row.tolist() for row in learner.logprobs(batch)]
        assert again == [row.tolist() for row in learner.logprobs(batch)]


def test_a_model_that_changes_its_logits_after_the_head_is_refused() -> None:
    torch.manual_seed(0)
    settings = {
        "vocab_size": models.VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.5,
    }  # fmt: skip
    capped = Gemma2ForCausalLM(Gemma2Config(**settings, attn_logit_softcapping=None, final_logit_softcapping=1.0))
    with pytest.raises(ValueError, match="Gemma2ForCausalLM gives other log-probabilities packed than alone"):
        Learner(capped, config(), models.DEVICE)
    attention = Gemma2ForCausalLM(Gemma2Config(**settings, attn_logit_softcapping=5.0, final_logit_softcapping=None))
    with pytest.raises(ValueError, match="Gemma2ForCausalLM cannot be trained packed"):
        Learner(attention, config(), models.DEVICE)


def test_a_model_that_ignores_the_attention_interface_is_refused() -> None:
    model = models.llama()
    layer = model.model.layers[0].self_attn
    own = type(layer).forward
    layer.forward = lambda *args, **kwargs: (own(layer, *args, **kwargs)[0].flip(1), None)
    with pytest.raises(ValueError, match="it does not use transformers' attention interface"):
        PackedModel(model, temperature=1.0, device=models.DEVICE)


def test_rows_longer_than_a_sliding_window_are_refused() -> None:
    torch.manual_seed(0)
    model = MistralForCausalLM(
        MistralConfig(
            vocab_size=models.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, sliding_window=8,
        )
    )  # fmt: skip
    reference = Reference(model, 1.0, models.DEVICE)
    batch = models.batch(num_prompts=1, group=2, longest=2)
    assert len(reference.logprobs(batch)) == 2
    batch.completion_ids[0] = [5] * 20
    with pytest.raises(ValueError, match=r"a row of \d+ tokens exceeds this model's sliding window of 8"):
        reference.logprobs(batch)
