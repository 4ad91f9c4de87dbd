"""Loss pieces: golden numbers small enough to check by hand, and the right values of known faults."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlneuron.trainer import losses


@pytest.mark.parametrize(
    ("advantage", "ratio", "wanted"), [(1, 1.5, -1.2), (1, 0.5, -0.5), (-1, 1.5, 1.5), (-1, 0.5, 0.8), (0, 9.0, 0.0)]
)
def test_clipping(advantage: float, ratio: float, wanted: float) -> None:
    got = losses.clipped_policy_loss(torch.tensor([[ratio]]), torch.tensor([[float(advantage)]]), 0.2, 0.2)
    assert got.item() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(("advantage", "wanted"), [(-1.0, 2.0), (1.0, -1.28)])
def test_delta_bounds_the_unclipped_branch(advantage: float, wanted: float) -> None:
    got = losses.clipped_policy_loss(torch.tensor([[7.0]]), torch.tensor([[advantage]]), 0.2, 0.28, 2.0)
    assert got.item() == pytest.approx(wanted, abs=1e-6)


def test_the_gradient_stops_only_where_the_clip_binds() -> None:
    ratio = torch.tensor([[1.5, 0.5, 1.1]], requires_grad=True)
    for advantage, wanted in ((1.0, [0.0, -1.0, -1.0]), (-1.0, [1.0, 0.0, 1.0])):
        loss = losses.clipped_policy_loss(ratio, torch.tensor([[advantage]]), 0.2, 0.2).sum()
        assert torch.autograd.grad(loss, ratio)[0].tolist() == [wanted]


def test_kl_estimators() -> None:
    values = [
        [losses.kl_estimate(torch.tensor(p), torch.tensor(q), kind=kind).item() for kind in ("k1", "k2", "k3")]
        for p, q in ((-1.0, -2.0), (-2.0, -1.0))
    ]
    assert values[0] == pytest.approx([1.0, 0.5, 0.367879], abs=1e-6)
    assert values[1] == pytest.approx([-1.0, 0.5, 0.718282], abs=1e-6)


def test_the_expectation_of_k1_and_k3_is_kl_of_policy_from_reference() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    for kind in ("k1", "k3"):
        assert (p * losses.kl_estimate(p.log(), q.log(), kind=kind)).sum().item() == pytest.approx(0.085123, abs=1e-6)


def test_gradient_of_the_corrected_kl_is_that_of_the_reverse_kl() -> None:
    """Ratio * k3, in expectation over the policy, is what TRL optimises with use_bias_correction_kl."""
    logits = torch.tensor([0.3, -0.2, 0.5, 0.1, -0.7], requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.0, 0.4, -0.3, 0.2, 0.6]), -1)
    logp = torch.log_softmax(logits, -1)
    exact = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)[0]
    ratio = (logp - logp.detach()).exp()
    estimate = (logp.exp().detach() * ratio * losses.kl_estimate(logp, ref)).sum()
    torch.testing.assert_close(torch.autograd.grad(estimate, logits)[0], exact, rtol=1e-5, atol=1e-6)


def test_sequence_level_is_the_geometric_mean_over_trained_tokens() -> None:
    logp, old = torch.tensor([[0.3, 0.1, 9.0], [5.0, 5.0, 5.0]]), torch.zeros(2, 3)
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    got = losses.log_importance_weights(logp, old, mask, level="sequence")
    torch.testing.assert_close(got, torch.tensor([[0.2], [0.0]]))
    assert losses.log_importance_weights(logp, old, mask, level="token") is not logp


MASK_LENGTHS = [1, 3, 2, 6]


def mask_of(lengths: list[int]) -> Tensor:
    return torch.tensor([[1.0] * n + [0.0] * (max(lengths) - n) for n in lengths])


def loss(loss_type: str, **options: int | None) -> float:
    mask = mask_of(MASK_LENGTHS)
    settings = {"num_rows": 4, "num_tokens": 12, "max_completion_length": 8, "micro_step_rows": 4, **options}
    weights = losses.row_weights(loss_type, mask.sum(1), **settings)  # type: ignore[arg-type]
    per_token = torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None].expand_as(mask)
    return losses.aggregate(per_token, mask, weights).item()


@pytest.mark.parametrize(
    ("loss_type", "wanted"), [("grpo", 2.5), ("dapo", 3.083333), ("dr_grpo", 1.15625), ("bnpo", 3.083333)]
)
def test_aggregation(loss_type: str, wanted: float) -> None:
    assert loss(loss_type) == pytest.approx(wanted, abs=1e-6)


def test_only_bnpo_depends_on_micro_steps() -> None:
    assert [loss(kind, micro_step_rows=2) for kind in ("grpo", "dapo", "dr_grpo")] == pytest.approx(
        [2.5, 3.083333, 1.15625], abs=1e-6
    )
    # (1 + 3 * 2) / 4 tokens and (2 * 3 + 6 * 4) / 8 tokens, the mean of both: TRL's definition.
    assert loss("bnpo", micro_step_rows=2) == pytest.approx((7 / 4 + 30 / 8) / 2, abs=1e-6)


def test_weight_of_a_token_in_short_and_long_rows() -> None:
    counts = torch.tensor([10, 90])
    by = {
        kind: losses.row_weights(kind, counts, num_rows=2, num_tokens=100, max_completion_length=100).tolist()
        for kind in ("grpo", "dapo", "dr_grpo")
    }
    assert by["grpo"] == pytest.approx([0.05, 0.0055556], abs=1e-6)
    assert by["dapo"] == pytest.approx([0.01, 0.01])
    assert by["dr_grpo"] == pytest.approx([0.005, 0.005])


def test_a_masked_row_leaves_the_token_mean_alone() -> None:
    mask = torch.tensor([[1.0] * 4, [0.0] * 4])
    weights = losses.row_weights("dapo", mask.sum(1), num_rows=2, num_tokens=4, max_completion_length=4)
    assert losses.aggregate(torch.ones(2, 4), mask, weights).item() == 1.0


@pytest.mark.parametrize("loss_type", losses.LOSS_TYPES)
def test_nothing_to_train_is_zero_not_nan(loss_type: str) -> None:
    mask = torch.zeros(2, 3)
    weights = losses.row_weights(
        loss_type, mask.sum(1), num_rows=2, num_tokens=0, max_completion_length=4, micro_step_rows=1
    )
    per_token = torch.ones(2, 3, requires_grad=True)
    total = losses.aggregate(per_token, mask, weights)
    total.backward()
    assert total.item() == 0.0 and per_token.grad is not None and per_token.grad.abs().max().item() == 0.0


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("token_truncate", [[1.0, 2.0, 0.5, 1.0]]),
        ("token_mask", [[1.0, 0.0, 0.0, 1.0]]),
        ("sequence_truncate", [[1.2]]),
        ("sequence_mask", [[1.2]]),
    ],
)
def test_sampling_correction(mode: str, wanted: list[list[float]]) -> None:
    old = torch.tensor([[1.0, 4.0, 0.3, 9.0]]).log().requires_grad_()
    sampling = torch.tensor([[1.0, 1.0, 1.0, math.nan]]).log()
    got = losses.sampling_correction(old, sampling, torch.ones(1, 4), mode=mode, clip_max=2.0, clip_min=0.5)
    torch.testing.assert_close(got, torch.tensor(wanted))
    assert not got.requires_grad


@pytest.mark.parametrize(("clip_max", "wanted"), [(3.0, 0.0), (4.0, 3.3201), (None, 3.3201)])
def test_small_differences_multiply_over_a_long_sequence(clip_max: float | None, wanted: float) -> None:
    old, sampling = torch.full((1, 100), 0.012), torch.zeros(1, 100)
    got = losses.sampling_correction(
        old, sampling, torch.ones(1, 100), mode="sequence_mask", clip_max=clip_max, clip_min=None
    )
    assert got.item() == pytest.approx(wanted, abs=1e-3)


def test_a_huge_difference_is_cut_and_not_infinite() -> None:
    old, sampling, mask = torch.full((1, 2), 100.0), torch.zeros(1, 2), torch.ones(1, 2)
    for mode in losses.CORRECTION_MODES:
        got = losses.sampling_correction(old, sampling, mask, mode=mode, clip_max=3.0, clip_min=None)
        assert set(got.flatten().tolist()) == {3.0 if mode.endswith("truncate") else 0.0}


def test_clip_flags_count_only_the_side_that_binds() -> None:
    ratio, advantages = torch.tensor([[0.5, 1.5], [0.5, 1.5]]), torch.tensor([[1.0], [-1.0]])
    low, high = losses.clip_flags(ratio, advantages, 0.2, 0.2)
    assert low.tolist() == [[False, False], [True, False]] and high.tolist() == [[False, True], [False, False]]
    mask = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    fraction = losses.row_fraction(high, mask)
    assert fraction[0].item() == 0.5 and fraction[1].isnan()
