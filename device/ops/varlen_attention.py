"""`rlneuron::varlen_attention`: causal attention over packed segments that may share a prefix, with its gradient.

For training and scoring only: no KV cache, no dropout, no sliding window. Queries of a segment see the whole of its
prefix segment (a shared prompt) and their own segment causally.

Legend: T packed tokens · H query heads · K key/value heads (H is a multiple of K) · D head size · S segments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlneuron.device.ops.library import LIBRARY

LIBRARY.define("varlen_attention(Tensor q, Tensor k, Tensor v, Tensor segments, float scale) -> (Tensor, Tensor)")
LIBRARY.define(
    "varlen_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor segments, "
    "float scale) -> (Tensor, Tensor, Tensor)"
)


def varlen_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, segments_S4: Tensor, scale: float) -> Tensor:
    """softmax(scale * q k^T) v per segment -> [T, H, D], of the dtype of `q_THD`.

    `segments_S4` (int32, on the same device) holds start, length, prefix start and prefix length (0: none) of each
    segment; positions in no segment give 0. All three inputs have one dtype, float32 or bfloat16; sums are float32.
    Flash attention's backward (arXiv 2205.14135) from the saved log-sum-exp.
    """
    assert q_THD.dtype == k_TKD.dtype == v_TKD.dtype, (q_THD.dtype, k_TKD.dtype, v_TKD.dtype)
    assert q_THD.shape[1] % k_TKD.shape[1] == 0 and segments_S4.dtype == torch.int32
    out, _ = torch.ops.rlneuron.varlen_attention(q_THD, k_TKD, v_TKD, segments_S4, scale)
    return out


def _masked_scores(q: Tensor, k: Tensor, prefix_length: int, scale: float) -> Tensor:
    """Scaled scores [K, H/K, Q, P+Q] of one segment in float32, -inf where the query may not look."""
    scores = torch.einsum("qkgd,skd->kgqs", q, k) * scale
    num_queries, num_keys = scores.shape[-2:]
    query = torch.arange(num_queries, device=q.device)[:, None] + prefix_length
    return scores.masked_fill(torch.arange(num_keys, device=q.device)[None] > query, -torch.inf)


def _gather(x: Tensor, start: int, length: int, prefix_start: int, prefix_length: int) -> Tensor:
    own = x[start : start + length].float()
    return torch.cat([x[prefix_start : prefix_start + prefix_length].float(), own]) if prefix_length else own


def _forward_plain(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    num_kv = k.shape[1]
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:2], dtype=torch.float32)
    for start, length, prefix_start, prefix_length in segments.tolist():
        own = slice(start, start + length)
        where = (start, length, prefix_start, prefix_length)
        q_qkgd = q[own].float().unflatten(1, (num_kv, -1))
        scores = _masked_scores(q_qkgd, _gather(k, *where), prefix_length, scale)
        lse_kgq = scores.logsumexp(-1)
        attended = torch.einsum("kgqs,skd->qkgd", (scores - lse_kgq[..., None]).exp(), _gather(v, *where))
        out[own] = attended.flatten(1, 2).to(q.dtype)
        lse[own] = lse_kgq.permute(2, 0, 1).flatten(1)
    return out, lse


def _backward_plain(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    num_kv = k.shape[1]
    dq, dk, dv = (x.new_zeros(x.shape, dtype=torch.float32) for x in (q, k, v))
    for start, length, prefix_start, prefix_length in segments.tolist():
        own, prefix = slice(start, start + length), slice(prefix_start, prefix_start + prefix_length)
        where = (start, length, prefix_start, prefix_length)
        q_qkgd, g_qkgd, o_qkgd = (x[own].float().unflatten(1, (num_kv, -1)) for x in (q, grad, out))
        keys = _gather(k, *where)
        lse_kgq = lse[own].unflatten(1, (num_kv, -1)).permute(1, 2, 0)
        p = (_masked_scores(q_qkgd, keys, prefix_length, scale) - lse_kgq[..., None]).exp()
        dp = torch.einsum("qkgd,skd->kgqs", g_qkgd, _gather(v, *where))
        delta = (g_qkgd * o_qkgd).sum(-1).permute(1, 2, 0)
        ds = p * (dp - delta[..., None]) * scale
        dq[own] = torch.einsum("kgqs,skd->qkgd", ds, keys).flatten(1, 2)
        dk_s = torch.einsum("kgqs,qkgd->skd", ds, q_qkgd)
        dv_s = torch.einsum("kgqs,qkgd->skd", p, g_qkgd)
        for total, part in ((dk, dk_s), (dv, dv_s)):
            total[prefix] += part[:prefix_length]
            total[own] += part[prefix_length:]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


LIBRARY.impl("varlen_attention", _forward_plain, "CompositeExplicitAutograd")
LIBRARY.impl("varlen_attention_backward", _backward_plain, "CompositeExplicitAutograd")


@torch.library.register_fake("rlneuron::varlen_attention")
def _(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.register_fake("rlneuron::varlen_attention_backward")
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, segments, scale = inputs
    ctx.save_for_backward(q, k, v, output[0], output[1], segments)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.scale = scale


def _autograd(ctx: Any, grad: Tensor | None, _grad_lse: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None
    q, k, v, out, lse, segments = ctx.saved_tensors
    grads = torch.ops.rlneuron.varlen_attention_backward(grad, q, k, v, out, lse, segments, ctx.scale)
    return (*grads, None, None)


torch.library.register_autograd("rlneuron::varlen_attention", _autograd, setup_context=_setup_context)
