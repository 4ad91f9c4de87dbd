"""Sampling one token per row from logits, with its log-probability, by inverse CDF of one uniform number.

The order is that of transformers' `generate`: repetition penalty, banned tokens, temperature, top-k, top-p, min-p.
It does not make the uniform numbers and does not know requests.
Legend: N rows of logits · V vocabulary · R draws (several may read one row).
"""

from __future__ import annotations

import torch

from rlneuron.device.ops.library import LIBRARY

LIBRARY.define(
    "sample_tokens(Tensor logits, Tensor rows, Tensor uniforms, Tensor temperatures, Tensor? top_k, Tensor? top_p, "
    "Tensor? min_p, Tensor? penalty, Tensor? seen, Tensor? seen_rows, Tensor? banned) -> (Tensor, Tensor)"
)


def sample_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    uniforms: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    penalty: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    seen_rows: torch.Tensor | None = None,
    banned: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a token for each of R rows.

    The token is the first whose cumulative probability (in order of token id) exceeds the uniform number, so a draw
    depends on its own row and number alone.

    Args:
        logits: [N, V] float32 or bfloat16; worked on in float32; not changed.
        rows: [R] int32, the row of `logits` each draw reads.
        uniforms: [R] float32 in [0, 1).
        temperatures: [R] float32; 0 takes the largest logit (the lowest id among equals).
        top_k: [R] int32, 0 is off; tokens equal to the k-th stay.
        top_p: [R] float32, 1 is off: the smallest set of most probable tokens that reaches it.
        min_p: [R] float32, 0 is off: tokens below min_p times the largest probability go.
        penalty: [R] float32, 1 is off: repetition penalty on tokens in `seen`.
        seen: [K, V] bool and seen_rows: [R] int32: which tokens occurred in prompt or output of draw r.
        banned: [R, E] int32, tokens of probability 0; -1 fills up.

    Returns:
        token ids [R] int32; log-probabilities [2, R] float32: row 0 of the distribution drawn from (at temperature 0
        of the penalised one at temperature 1), row 1 of softmax(logits).
    """
    return torch.ops.rlneuron.sample_tokens(
        logits, rows, uniforms, temperatures, top_k, top_p, min_p, penalty, seen, seen_rows, banned
    )


def _plain(
    logits: torch.Tensor,
    rows: torch.Tensor,
    uniforms: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    penalty: torch.Tensor | None,
    seen: torch.Tensor | None,
    seen_rows: torch.Tensor | None,
    banned: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator in plain PyTorch: the definition, and what runs where there is no kernel."""
    raw_RV = logits[rows.long()].float()
    scores_RV = raw_RV
    if penalty is not None:
        assert seen is not None and seen_rows is not None, "a penalty needs seen and seen_rows"
        factor = torch.where(scores_RV < 0, penalty[:, None], 1.0 / penalty[:, None])
        scores_RV = torch.where(seen[seen_rows.long()], scores_RV * factor, scores_RV)
    if banned is not None:
        scores_RV = _ban(scores_RV, banned)
    greedy = temperatures <= 0
    scores_RV = scores_RV / torch.where(greedy, 1.0, temperatures)[:, None]
    filtered = filter_scores(scores_RV, top_k, top_p, min_p)
    scores_RV = torch.where(greedy[:, None], scores_RV, filtered)
    cumulative = torch.softmax(scores_RV, dim=-1).cumsum(dim=-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    # Rounding may leave the target at the end: then the last token of positive probability.
    finite = torch.isfinite(scores_RV)
    last = finite.shape[1] - 1 - finite.flip(1).int().argmax(dim=1)
    tokens = torch.where(greedy, scores_RV.argmax(dim=-1), torch.minimum(drawn, last))
    index = tokens[:, None]
    logprobs = torch.log_softmax(scores_RV, dim=-1).gather(1, index).squeeze(1)
    model_logprobs = torch.log_softmax(raw_RV, dim=-1).gather(1, index).squeeze(1)
    return tokens.to(torch.int32), torch.stack([logprobs, model_logprobs])


def _ban(scores_RV: torch.Tensor, banned_RE: torch.Tensor) -> torch.Tensor:
    """`scores_RV` with -inf at the banned tokens; -1 bans nothing."""
    wide = torch.cat([scores_RV, scores_RV[:, :1]], dim=1)  # one column more, where -1 points to
    index = torch.where(banned_RE >= 0, banned_RE, scores_RV.shape[1]).long()
    return wide.scatter(1, index, float("-inf"))[:, :-1]


def filter_scores(
    scores_RV: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    """Scores (logits over temperature) with -inf where top-k, top-p and min-p, in this order, cut.

    Example: scores [2, 1, 0, -1], top_p 0.8 keeps {0, 1}: probabilities .644, .237, and .644 < .8 <= .881.
    """
    low = float("-inf")
    if top_k is not None:
        vocab = scores_RV.shape[1]
        k = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab).long()
        kth = scores_RV.sort(dim=-1, descending=True).values.gather(1, k[:, None] - 1)
        scores_RV = scores_RV.masked_fill(scores_RV < kth, low)
    if top_p is not None:
        ordered, index = scores_RV.sort(dim=-1, descending=True, stable=True)
        probability = torch.softmax(ordered, dim=-1)
        before = probability.cumsum(dim=-1) - probability
        cut = (before >= top_p[:, None]) & (top_p < 1.0)[:, None]
        cut[:, 0] = False
        scores_RV = scores_RV.masked_fill(torch.zeros_like(cut).scatter(1, index, cut), low)
    if min_p is not None:
        top = scores_RV.amax(dim=-1, keepdim=True)
        lowest = top + torch.log(min_p)[:, None]  # log(0) = -inf cuts nothing
        scores_RV = scores_RV.masked_fill(scores_RV < torch.minimum(lowest, top), low)
    return scores_RV


@torch.library.register_fake("rlneuron::sample_tokens", lib=LIBRARY)
def _fake(
    logits: torch.Tensor,
    rows: torch.Tensor,
    uniforms: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    penalty: torch.Tensor | None,
    seen: torch.Tensor | None,
    seen_rows: torch.Tensor | None,
    banned: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    draws = rows.shape[0]
    return rows.new_empty((draws,), dtype=torch.int32), rows.new_empty((2, draws), dtype=torch.float32)


LIBRARY.impl("sample_tokens", _plain, "CompositeExplicitAutograd")
