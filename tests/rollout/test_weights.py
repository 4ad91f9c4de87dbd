"""New weights in a running engine: strict checks, no stale prefix, versions per token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlneuron.rollout import LLM, SamplingParams
from tests.rollout import models

PARAMS = SamplingParams(temperature=0, max_tokens=20)


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3", "gpt2"])
def test_updated_engine_equals_a_fresh_one(name: str) -> None:
    llm = LLM(models.build(name), num_blocks=200)
    (prompt,) = models.prompts(40)
    llm.generate([prompt], PARAMS)
    assert llm.generate([prompt], PARAMS)[0].num_cached_tokens == 32
    new = models.build(name, seed=1)
    llm.engine.update_weights(1, weights(new))
    (after,) = llm.generate([prompt], PARAMS)
    (fresh,) = LLM(new, num_blocks=200).generate([prompt], PARAMS)
    assert after.num_cached_tokens == 0
    assert after.outputs[0].token_ids == fresh.outputs[0].token_ids
    assert after.outputs[0].logprobs == fresh.outputs[0].logprobs
    assert after.outputs[0].weight_versions == [1] * 20


def test_running_requests_continue_and_record_versions() -> None:
    llm = LLM(models.build(), num_blocks=200)
    engine = llm.engine
    (prompt,) = models.prompts(40)
    params = SamplingParams(n=2, max_tokens=60, seed=0)
    engine.add_request("old", prompt, params)
    for _ in range(20):
        engine.step()
    new = models.build(seed=1)
    engine.update_weights(3, weights(new))
    # The old request's blocks are in use, but the same prompt must not find them.
    engine.add_request("new", prompt, params)
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step()}
        engine.check()
    for c in done["old"].outputs:
        assert c.weight_versions == [0] * 20 + [3] * 40
        before = models.teacher_forced(models.build(), prompt, c.token_ids[:20])
        torch.testing.assert_close(torch.tensor(c.logprobs[:20]), before, rtol=0, atol=1e-5)
    assert done["new"].num_cached_tokens == 0
    for c in done["new"].outputs:
        assert c.weight_versions == [3] * 60
        expected = models.teacher_forced(new, prompt, c.token_ids)
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, rtol=0, atol=1e-5)
    # What the old request computed, with either weights, is not found afterwards.
    (again,) = llm.generate([prompt + done["old"].outputs[0].token_ids], PARAMS)
    assert again.num_cached_tokens == 32


def test_preempted_requests_record_versions_too() -> None:
    llm = LLM(models.build(), num_blocks=8)
    engine = llm.engine
    for i, prompt in enumerate(models.prompts(*[20] * 4)):
        engine.add_request(str(i), prompt, SamplingParams(max_tokens=40, seed=i))
    while engine.stats.preemptions == 0:
        engine.step()
    engine.update_weights(1, weights(models.build(seed=1)))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    for c in (output.outputs[0] for output in outputs):
        assert len(c.weight_versions) == len(c.token_ids) and c.weight_versions == sorted(c.weight_versions)
    assert {v for output in outputs for v in output.outputs[0].weight_versions} == {0, 1}


def test_wrong_updates_change_nothing() -> None:
    llm = LLM(models.build("llama-tied"), num_blocks=200)
    before = llm.generate([[5, 6, 7]], PARAMS)[0].outputs
    good = weights(models.build("llama-tied", seed=1))
    name = "model.layers.0.mlp.up_proj.weight"
    tied = "lm_head.weight"
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        ({k: v for k, v in good.items() if k != name}, f"missing .*{name}"),
        ({**good, "extra": torch.zeros(1)}, "unknown .*extra"),
        ({**good, name: good[name][:-1]}, "up_proj.weight is .95, 64"),
        ({**good, name: good[name].double()}, "float64"),
        ({**good, tied: good["model.embed_tokens.weight"] + 1}, "tied"),
    ]
    for tensors, text in cases:
        with pytest.raises(ValueError, match=text):
            llm.engine.update_weights(1, tensors)
    with pytest.raises(ValueError, match="version is 0"):
        llm.engine.update_weights(0, good)
    assert llm.generate([[5, 6, 7]], PARAMS)[0].outputs == before
    llm.engine.update_weights(1, {**good, tied: good["model.embed_tokens.weight"].clone()})
    model = llm.engine._model.model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_module_may_be_shared_with_a_learner() -> None:
    """Generating leaves training mode, gradients and the attention implementation as they were."""
    model = models.build("gpt2").train()
    model.config.resid_pdrop = 0.5
    llm = LLM(model, num_blocks=200)
    (out,) = llm.generate([[5, 6, 7]], PARAMS)
    assert model.training and model.config._attn_implementation == "sdpa"
    assert out.outputs[0].token_ids == models.greedy(models.build("gpt2"), [5, 6, 7], 20)
    model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
