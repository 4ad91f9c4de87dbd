"""Requests one by one: finish reasons, seeds, refusals, aborts, text."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from rlneuron.rollout import LLM, Engine, SamplingParams, find_eos_token_ids
from tests.rollout import models


@pytest.fixture
def llm() -> LLM:
    return LLM(models.build(), models.tokenizer(), num_blocks=200)


def test_every_end_of_several_ends_a_completion(llm: LLM) -> None:
    prompt = models.prompts(9)[0]
    free = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0].outputs[0]
    ninth = free.token_ids[8]
    two_ends = LLM(models.build(), num_blocks=200, eos_token_ids=[models.EOS, ninth])
    ended = two_ends.generate([prompt], SamplingParams(temperature=0, max_tokens=20))[0].outputs[0]
    first = free.token_ids.index(ninth)
    assert ended.token_ids == free.token_ids[: first + 1]
    assert (ended.finish_reason, free.finish_reason) == ("stop", "length")
    by_stop = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(ninth,)))[0]
    assert by_stop.outputs[0].token_ids == ended.token_ids and by_stop.outputs[0].finish_reason == "stop"


def test_end_ids_come_from_model_and_tokenizer() -> None:
    model = models.build()
    model.generation_config.eos_token_id = [5, 9]
    assert find_eos_token_ids(model, models.tokenizer()) == [2, 5, 9]


def test_min_tokens_forbids_the_end_until_then() -> None:
    llm = LLM(models.build(), num_blocks=200, eos_token_ids=range(3, models.VOCAB))  # nearly everything ends
    for seed in range(5):
        out = llm.generate([[3, 4]], SamplingParams(max_tokens=8, min_tokens=5, seed=seed))[0].outputs[0]
        assert set(out.token_ids[:4]) <= {0, 1, 2} and len(out.token_ids) >= 5


def test_seeded_requests_do_not_depend_on_neighbours(llm: LLM) -> None:
    prompt = models.prompts(12)[0]
    seeded = SamplingParams(n=4, seed=7, max_tokens=32, ignore_eos=True)
    alone = llm.generate([prompt], seeded)[0]
    others = [SamplingParams(n=3, max_tokens=5 + i, temperature=0.5 + i, top_k=4) for i in range(5)]
    beside = llm.generate([*models.prompts(30, 4, 9, 17, 50), prompt], [*others, seeded])[-1]
    assert [c.token_ids for c in alone.outputs] == [c.token_ids for c in beside.outputs]
    assert len({tuple(c.token_ids) for c in alone.outputs}) == 4
    short = llm.generate([prompt], SamplingParams(n=2, seed=7, max_tokens=6, ignore_eos=True))[0]
    assert [c.token_ids for c in short.outputs] == [c.token_ids[:6] for c in alone.outputs[:2]]
    greedy = llm.generate([prompt], SamplingParams(n=4, temperature=0))[0]
    assert len({tuple(c.token_ids) for c in greedy.outputs}) == 1


def test_unseeded_requests_differ_and_follow_the_engines_seed() -> None:
    def draw(seed: int) -> list[list[int]]:
        llm = LLM(models.build(), num_blocks=200, seed=seed)
        return [o.outputs[0].token_ids for o in llm.generate([[5, 6]] * 2, SamplingParams(max_tokens=12))]

    first = draw(0)
    assert first[0] != first[1] and draw(0) == first and draw(1) != first


def test_repetition_penalty_sees_prompt_and_output() -> None:
    """With a penalty that forbids repetition no token comes twice."""
    llm = LLM(models.build(), num_blocks=200)
    prompt = list(range(10, 40))
    params = SamplingParams(n=2, repetition_penalty=1e6, temperature=0.05, max_tokens=20, seed=0)
    plain, penalised = llm.generate([prompt, prompt], [SamplingParams(n=2, max_tokens=20, seed=0), params])
    for c in penalised.outputs:
        positive = [t for t in c.token_ids if t not in prompt]
        assert len(set(positive)) == len(positive)
    again = LLM(models.build(), num_blocks=200).generate([prompt], SamplingParams(n=2, max_tokens=20, seed=0))[0]
    assert [c.token_ids for c in plain.outputs] == [c.token_ids for c in again.outputs]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"n": 0}, "n is 0"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 20}, "min_tokens is 20 but max_tokens is 16"),
        ({"seed": -1}, "seed"),
        ({"stop_token_ids": "AI"}, "stop_token_ids"),
        ({"n": True}, "n is True"),
    ],
)
def test_parameters_out_of_range_are_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SamplingParams(**wrong)


def test_tiny_temperature_is_greedy(llm: LLM) -> None:
    tiny, zero = (llm.generate([[5, 6, 7]], SamplingParams(temperature=t))[0].outputs[0] for t in (1e-6, 0.0))
    assert tiny == zero


def test_requests_that_can_never_run_are_refused_with_both_numbers() -> None:
    llm = LLM(models.build(), num_blocks=4)
    for prompt, params, text in [
        ([], SamplingParams(), "no tokens"),
        ([models.VOCAB], SamplingParams(), "token id 97.*0 to 96"),
        ([-1], SamplingParams(), "token id -1"),
        ([5], SamplingParams(stop_token_ids=(1000,)), "stop_token_ids.*1000"),
        ([5] * 250, SamplingParams(), "250 prompt tokens .* 16 = 266 positions; the model has 256"),
        ([5] * 60, SamplingParams(), "76 tokens, 5 blocks of 16; the cache has 4"),
    ]:
        with pytest.raises(ValueError, match=text):
            llm.generate([prompt], params)
    assert not llm.engine.has_unfinished
    assert len(llm.generate([[5] * 49], SamplingParams(ignore_eos=True))[0].outputs[0].token_ids) == 16  # 4 blocks


def step_until(engine: Engine, condition: Any) -> None:
    while not condition():
        engine.step()


def test_abort_in_every_phase_gives_all_blocks_back() -> None:
    llm = LLM(models.build(), num_blocks=60, max_num_seqs=4, max_num_batched_tokens=8)
    engine = llm.engine
    params = SamplingParams(n=2, max_tokens=30, seed=1)
    prompts = models.prompts(30, 30, 30)
    expected = LLM(models.build(), num_blocks=200).generate([prompts[0]], params)[0]
    for name, prompt in zip("abc", prompts, strict=True):
        engine.add_request(name, prompt, params)
    queued = engine.abort("c")
    assert queued is not None and [c.finish_reason for c in queued.outputs] == ["abort"] * 2
    assert [c.token_ids for c in queued.outputs] == [[], []]
    step_until(engine, lambda: engine.stats.prefill_tokens > 32)  # b is half computed
    assert engine.abort("b") is not None
    engine.check()
    engine.add_request("b", prompts[1], params)
    step_until(engine, lambda: engine.stats.decode_tokens > 60)
    engine.check()
    decoding = engine.abort("b")
    assert decoding is not None and len(decoding.outputs[0].token_ids) > 0
    assert len(decoding.outputs[0].logprobs) == len(decoding.outputs[0].token_ids)
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert [c.token_ids for c in outputs[0].outputs] == [c.token_ids for c in expected.outputs]
    assert engine.abort("a") is None and engine.abort("never") is None  # after the end, and unknown
    engine.check()
    assert engine.stats.num_free_blocks == 60 and engine.step() == []


def test_one_sample_may_finish_before_an_abort() -> None:
    llm = LLM(models.build(), num_blocks=200, eos_token_ids=range(40, models.VOCAB))
    engine = llm.engine
    engine.add_request("a", [5, 6], SamplingParams(n=8, max_tokens=200, seed=0))
    step_until(engine, lambda: engine.stats.num_running in range(1, 8))
    output = engine.abort("a")
    assert output is not None and [c.index for c in output.outputs] == list(range(8))
    assert {c.finish_reason for c in output.outputs} == {"stop", "abort"}


def test_a_failing_step_leaves_a_usable_engine(llm: LLM) -> None:
    prompt = models.prompts(40)[0]
    expected = llm.generate([prompt], SamplingParams(seed=0))[0]
    weight = llm.engine._model.model.model.norm.weight
    with torch.no_grad():
        weight.fill_(math.nan)
        with pytest.raises(RuntimeError, match="NaN"):
            llm.generate([prompt], SamplingParams(seed=0))
        weight.fill_(1.0)
    assert not llm.engine.has_unfinished
    llm.engine.check()
    again = llm.generate([prompt], SamplingParams(seed=0))[0]
    assert again.num_cached_tokens == 0 and again.outputs[0].token_ids == expected.outputs[0].token_ids


def test_texts_and_conversations(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    text, ids, chat = llm.generate(["w5 w6 w1", [5, 6, 1], [{"role": "user", "content": "w5 w6"}]], params)
    assert text.prompt_token_ids == ids.prompt_token_ids == chat.prompt_token_ids == [5, 6, 1]
    out = text.outputs[0]
    assert out.text == " ".join(f"w{t}" for t in out.token_ids if t != models.EOS)
    with pytest.raises(ValueError, match="give a list"):
        llm.generate("w5", params)
    with pytest.raises(ValueError, match="2 params were given for 1 prompts"):
        llm.generate(["w5"], [params, params])
    with pytest.raises(ValueError, match="no tokenizer"):
        LLM(models.build(), num_blocks=10).generate(["w5"], params)


class NoInterface(LlamaForCausalLM):
    """A decoder whose attention is its own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn = OwnAttention(config)


class OwnAttention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return self.proj(hidden_states), None


def test_models_that_would_be_wrong_are_refused_in_one_sentence() -> None:
    sinks = GptOssConfig(**models.COMMON, head_dim=16, num_local_experts=2, num_experts_per_tok=1)
    dynamic = LlamaConfig(**models.COMMON, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    for model, text in [
        (GptOssForCausalLM(sinks), "its attention needs s_aux"),
        (LlamaForCausalLM(dynamic), "dynamic"),
        (NoInterface(LlamaConfig(**models.COMMON)), "0 of its 2 layers use transformers' attention interface"),
        (nn.Linear(2, 2), "not a transformers causal language model"),
    ]:
        with pytest.raises(ValueError, match=f"{type(model).__name__} cannot be generated from: .*{text}"):
            LLM(model)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"block_size": 10}, "block_size is 10"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens is 32"),
        ({"max_model_len": 1000}, "max_model_len is 1000 but the model has 256"),
        ({"num_blocks": 5, "kv_cache_tokens": 80}, "give one of them"),
        ({"eos_token_ids": [97]}, "eos_token_ids holds token id 97"),
    ],
)
def test_wrong_budgets_are_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LLM(models.build(), **wrong)
