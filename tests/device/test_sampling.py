"""sample_tokens: compiled against plain form, and both against transformers' processors and known numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from rlneuron.device.ops import kernels
from rlneuron.device.ops import sampling as module
from rlneuron.device.ops.sampling import sample_tokens

FILTERS = ("top_k", "top_p", "min_p", "penalty", "seen", "seen_rows", "banned")
DRAWS = 64


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def options(name: str, vocab: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    if name == "top_k":
        return {"top_k": ints(5, 0, 2 * vocab, 1).repeat(DRAWS // 4)}
    if name == "top_p":
        return {"top_p": torch.tensor([0.9, 0.5, 1.0, 1e-6]).repeat_interleave(DRAWS // 4)}
    if name == "min_p":
        return {"min_p": torch.rand(DRAWS, generator=draw) * 0.3}
    if name == "penalty":
        rows = torch.randint(0, 9, (DRAWS,), generator=draw, dtype=torch.int32)
        seen = torch.rand(9, vocab, generator=draw) > 0.5
        return {"penalty": torch.rand(DRAWS, generator=draw) + 0.7, "seen": seen, "seen_rows": rows}
    if name == "banned":
        return {"banned": torch.randint(-1, vocab, (DRAWS, min(5, vocab - 1)), generator=draw, dtype=torch.int32)}
    return {}


@pytest.mark.parametrize("name", ["none", "top_k", "top_p", "min_p", "penalty", "banned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [3, 1000])
def test_compiled_form_equals_plain_form(name: str, dtype: torch.dtype, vocab: int, neuron: torch.device) -> None:
    assert kernels.load(), "the kernels are not compiled; run: rlneuron build"
    draw = torch.Generator().manual_seed(0)
    logits = (torch.randn(32, vocab, generator=draw) * 3).to(dtype)
    rows = torch.randint(0, 32, (DRAWS,), generator=draw, dtype=torch.int32)
    number = torch.rand(DRAWS, generator=draw)
    temperature = torch.tensor([1.0, 0.5, 2.0, 0.0]).repeat(DRAWS // 4)
    given = options(name, vocab)
    tokens, logprobs = sample_tokens(logits, rows, number, temperature, **given)
    plain = module._plain(logits, rows, number, temperature, *[given.get(f) for f in FILTERS])
    assert torch.equal(tokens, plain[0])
    torch.testing.assert_close(logprobs, plain[1], rtol=2e-6, atol=2e-6)
    there = {key: value.to(neuron) for key, value in given.items()}
    on_neuron = sample_tokens(*(x.to(neuron) for x in (logits, rows, number, temperature)), **there)
    assert torch.equal(on_neuron[0].cpu(), tokens) and torch.equal(on_neuron[1].cpu(), logprobs)


def draws_of(logits: list[float], count: int, temperature: float = 1.0, **given: Any) -> torch.Tensor:
    """`count` draws from one row of logits; scalars in `given` hold for all."""
    number = torch.rand(count, generator=torch.Generator().manual_seed(3))
    rows = torch.zeros(count, dtype=torch.int32)
    every = {
        key: torch.full((count,), value, dtype=torch.int32 if isinstance(value, int) else torch.float32)
        for key, value in given.items()
        if not isinstance(value, torch.Tensor)
    }
    every |= {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
    return sample_tokens(torch.tensor([logits]), rows, number, torch.full((count,), temperature), **every)[0]


@pytest.mark.parametrize(("temperature", "support"), [(0.5, {0}), (1.0, {0, 1}), (2.0, {0, 1, 2})])
def test_temperature_comes_before_the_nucleus(temperature: float, support: set[int]) -> None:
    tokens = draws_of([2.0, 1.0, 0.0, -1.0], 4000, temperature, top_p=0.8)
    assert set(tokens.tolist()) == support


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(0.5, [-0.142932, -2.142932, -4.142932]), (2.0, [-0.680270, -1.180270, -1.680270])],
)
def test_logprobs_are_of_the_tempered_distribution(temperature: float, expected: list[float]) -> None:
    """One draw in the middle of each token's share of the cumulative distribution."""
    share = torch.tensor(expected).exp()
    number = share.cumsum(0) - share / 2
    logits, rows = torch.tensor([[2.0, 1.0, 0.0]]), torch.zeros(3, dtype=torch.int32)
    tokens, logprobs = sample_tokens(logits, rows, number, torch.full((3,), temperature))
    assert tokens.tolist() == [0, 1, 2]
    torch.testing.assert_close(logprobs[0], torch.tensor(expected), rtol=0, atol=2e-6)
    torch.testing.assert_close(logprobs[1], logits[0].log_softmax(0), rtol=0, atol=2e-6)


PROCESSORS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "temperature": ({"temperature": 0.7}, [hf.TemperatureLogitsWarper(0.7)]),
    "top_k": ({"top_k": 5}, [hf.TopKLogitsWarper(5)]),
    "top_p": ({"top_p": 0.8}, [hf.TopPLogitsWarper(0.8)]),
    "min_p": ({"min_p": 0.2}, [hf.MinPLogitsWarper(0.2)]),
    "penalty": ({"penalty": 1.7}, [hf.RepetitionPenaltyLogitsProcessor(1.7)]),
    "all": (
        {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.05, "penalty": 1.4},
        [
            hf.RepetitionPenaltyLogitsProcessor(1.4),
            hf.TemperatureLogitsWarper(1.3),
            hf.TopKLogitsWarper(12),
            hf.TopPLogitsWarper(0.9),
            hf.MinPLogitsWarper(0.05),
        ],
    ),
}


@pytest.mark.parametrize("name", list(PROCESSORS))
def test_sampler_agrees_with_transformers_processors(name: str) -> None:
    """Chi-square over 1e5 draws, at a level of about 1e-4 (Wilson and Hilferty's approximation)."""
    given, processors = PROCESSORS[name]
    logits = (torch.randn(20, generator=torch.Generator().manual_seed(5)) * 1.5).tolist()
    context = torch.tensor([[0, 3, 3, 7, 11]])
    scores = LogitsProcessorList(processors)(context, torch.tensor([logits]))
    probability = scores.softmax(-1)[0].double()
    if "penalty" in given:
        seen = torch.zeros(1, 20, dtype=torch.bool).index_fill(1, context[0], True)
        given = given | {"seen": seen, "seen_rows": torch.zeros(100_000, dtype=torch.int32)}
    counts = torch.bincount(draws_of(logits, 100_000, **given).long(), minlength=20).double()
    assert counts[probability == 0].sum() == 0
    kept = probability > 0
    expected = probability[kept] * 100_000
    chi_square = float(((counts[kept] - expected) ** 2 / expected).sum())
    freedom = int(kept.sum()) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit


def test_repetition_penalty_does_not_depend_on_neighbours() -> None:
    """Logits [2, -1, 0.5], penalty 2, tokens 0 and 1 seen -> [1, -2, 0.5], in either order of the batch."""
    logits, seen = torch.tensor([[2.0, -1.0, 0.5]]), torch.tensor([[True, True, False], [False, False, False]])
    expected = torch.tensor([1.0, -2.0, 0.5]).log_softmax(0)
    for order in ([0, 1], [1, 0]):
        penalty = torch.tensor([2.0, 1.0])[order]
        number = torch.tensor([0.99, 0.99])
        tokens, logprobs = sample_tokens(
            logits, ints(0, 0), number, torch.ones(2), penalty=penalty, seen=seen, seen_rows=ints(*order)
        )
        row = order.index(0)
        torch.testing.assert_close(logprobs[0, row], expected[tokens[row]], rtol=0, atol=1e-6)
        torch.testing.assert_close(logprobs[0, 1 - row], logits[0].log_softmax(0)[tokens[1 - row]], rtol=0, atol=1e-6)


def test_greedy_takes_the_first_of_equals_and_extreme_draws_stay_inside() -> None:
    assert draws_of([1.0, 3.0, 3.0], 1, 0.0).tolist() == [1]
    logits = torch.tensor([[0.0, 1.0, float("-inf"), 2.0, float("-inf")]])
    edge = torch.tensor([0.0, 1.0 - 2.0**-24])
    assert sample_tokens(logits, ints(0, 0), edge, torch.ones(2))[0].tolist() == [0, 3]


def test_broken_logits_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="NaN"):
        draws_of([0.0, float("nan"), 1.0], 1)
