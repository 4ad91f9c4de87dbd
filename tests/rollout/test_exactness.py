"""Answers equal Hugging Face's, and do not depend on the load: batch, order, preemption, prefix cache, chunking."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlneuron.device import select
from rlneuron.rollout import LLM, RequestOutput, SamplingParams
from tests.rollout import models

GREEDY = SamplingParams(temperature=0, max_tokens=20)


def answers(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def assert_same(got: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Equal tokens, and log-probabilities within 1e-5."""
    assert answers(got) == answers(expected)
    for a, b in zip(got, expected, strict=True):
        for x, y in zip(a.outputs, b.outputs, strict=True):
            torch.testing.assert_close(torch.tensor(x.logprobs), torch.tensor(y.logprobs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", list(models.BUILDERS))
def test_greedy_equals_generate(name: str) -> None:
    model = models.build(name)
    prompts = models.prompts(1, 5, 16, 17, 33, 40)
    expected = [models.greedy(model, prompt, 20) for prompt in prompts]
    llm = LLM(model, num_blocks=200)
    for order in (range(6), reversed(range(6))):
        picked = list(order)
        outputs = llm.generate([prompts[i] for i in picked], GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == [expected[i] for i in picked]
    llm.engine.check()
    assert model.config._attn_implementation in ("sdpa", "eager"), "the module was not left as it was"


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_equal_teacher_forcing(name: str, temperature: float) -> None:
    model = models.build(name)
    prompts = models.prompts(3, 40)  # a short prompt beside a long one: positions must be its own
    outputs = LLM(model, num_blocks=200).generate(
        prompts, SamplingParams(n=3, temperature=temperature, max_tokens=30, seed=1)
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        for c in output.outputs:
            sampled = models.teacher_forced(model, prompt, c.token_ids, temperature)
            raw = models.teacher_forced(model, prompt, c.token_ids)
            torch.testing.assert_close(torch.tensor(c.logprobs), sampled, rtol=0, atol=1e-5)
            torch.testing.assert_close(torch.tensor(c.model_logprobs), raw, rtol=0, atol=1e-5)


def sampled(load: dict[str, Any], model: Any | None = None) -> tuple[list[RequestOutput], LLM]:
    llm = LLM(model or models.build(), **{"num_blocks": 300, **load})
    params = [SamplingParams(n=1 + i % 3, max_tokens=24 + i, seed=i) for i in range(8)]
    outputs = llm.generate(models.prompts(30, 7, 16, 45, 32, 3, 50, 18), params)
    llm.engine.check()
    assert llm.engine.stats.num_free_blocks == llm.engine.stats.num_blocks
    return outputs, llm


@pytest.fixture(scope="module")
def unconstrained() -> list[RequestOutput]:
    return sampled({})[0]


@pytest.mark.parametrize(
    "load",
    [
        {"enable_prefix_caching": False},
        {"max_num_seqs": 3},
        {"max_num_seqs": 4, "max_num_batched_tokens": 7},  # prompts in chunks of a few tokens
        {"max_num_seqs": 16, "max_num_batched_tokens": 64, "num_blocks": 11},
        {"block_size": 32},
    ],
    ids=str,
)
def test_answers_do_not_depend_on_the_load(load: dict[str, Any], unconstrained: list[RequestOutput]) -> None:
    assert_same(sampled(load)[0], unconstrained)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_preemption_changes_nothing(name: str) -> None:
    """A pool of about twice one request, eight greedy requests."""
    model, prompts = models.build(name), models.prompts(*[20] * 8)
    free = LLM(model, num_blocks=200).generate(prompts, SamplingParams(temperature=0, max_tokens=40))
    for caching in (True, False):
        tight = LLM(model, num_blocks=8, enable_prefix_caching=caching)
        outputs = tight.generate(prompts, SamplingParams(temperature=0, max_tokens=40))
        assert tight.engine.stats.preemptions > 0
        assert_same(outputs, free)
        tight.engine.check()
        assert tight.engine.stats.num_free_blocks == 8


def test_a_groups_prompt_is_computed_once() -> None:
    llm = LLM(models.build(), num_blocks=200)
    (prompt,) = models.prompts(37)
    (output,) = llm.generate([prompt], SamplingParams(n=8, max_tokens=10, seed=0))
    stats = llm.engine.stats
    assert stats.prefill_tokens == 37
    assert stats.copied_blocks == 7  # the partial block: the last sample keeps the original
    for c in output.outputs:
        expected = models.teacher_forced(models.build(), prompt, c.token_ids)
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, rtol=0, atol=1e-5)


def test_equal_prompts_meet_in_the_prefix_cache() -> None:
    llm = LLM(models.build(), num_blocks=200)
    (prompt,) = models.prompts(37)
    first = llm.generate([prompt] * 3, GREEDY)  # even within one step
    assert [o.num_cached_tokens for o in first] == [0, 32, 32]
    assert llm.engine.stats.prefill_tokens == 37 + 5 + 5
    (later,) = llm.generate([prompt], GREEDY)
    assert later.num_cached_tokens == 32
    assert answers(first) == answers([later] * 3)
    # The same tokens after another beginning are another prefix.
    (other,) = llm.generate([[prompt[0] % 90 + 4, *prompt[1:]]], GREEDY)
    assert other.num_cached_tokens == 0


def test_more_samples_than_slots() -> None:
    model = models.build()
    (prompt,) = models.prompts(21)
    (wide,) = LLM(model, num_blocks=200).generate([prompt], SamplingParams(n=7, seed=3))
    narrow = LLM(model, num_blocks=200, max_num_seqs=2)
    assert_same(narrow.generate([prompt], SamplingParams(n=7, seed=3)), [wide])


def test_neuron_gives_the_same_numbers() -> None:
    neuron = select.choose("neuron", simulate=True).device
    on_neuron, llm = sampled({"device": neuron})
    assert llm.engine._runner.key_caches[0].device.type == "neuron"
    assert answers(on_neuron) == answers(sampled({})[0])


def test_bfloat16_stays_near_float32() -> None:
    model = models.build().to(torch.bfloat16)
    prompts = models.prompts(5, 40)
    outputs = LLM(model, num_blocks=200).generate(prompts, SamplingParams(max_tokens=20, seed=0))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = models.teacher_forced(model, prompt, output.outputs[0].token_ids)
        torch.testing.assert_close(torch.tensor(output.outputs[0].model_logprobs), expected, rtol=0, atol=0.25)


@settings(max_examples=15, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=8),
    blocks=st.integers(5, 20),
    seqs=st.integers(1, 6),
    budget=st.integers(6, 50),
    caching=st.booleans(),
)
def test_random_workloads(
    shapes: list[tuple[int, int, int]], blocks: int, seqs: int, budget: int, caching: bool
) -> None:
    prompts = models.prompts(*[p for p, _, _ in shapes])
    params = [SamplingParams(n=n, max_tokens=m, seed=i) for i, (_, m, n) in enumerate(shapes)]
    model = models.build("gpt2")
    free = LLM(model, num_blocks=400).generate(prompts, params)
    tight = LLM(
        model, num_blocks=blocks, max_num_seqs=seqs, max_num_batched_tokens=budget, enable_prefix_caching=caching
    )
    assert_same(tight.generate(prompts, params), free)
    tight.engine.check()
    assert tight.engine.stats.num_free_blocks == blocks
