"""Log-probability of given tokens, and the entropy, straight from hidden states: no [N, V] tensor of all tokens.

`token_logprobs` goes through the output head in chunks of rows, so that at most one chunk's logits exist at a time;
the backward recomputes them. Its matrix products are `ops.linear`'s, the rest is plain PyTorch.

Legend: N scored tokens · H hidden size · V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlneuron.device.ops.linear import linear, mm

# Elements of one chunk's logits: 4 MB in float32, which stay in the L2/L3 cache between the GEMM and the softmax.
CHUNK_ELEMENTS = 1 << 20


def token_logprobs(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log softmax((hidden weight^T + bias) / temperature) at `targets_N`, and that distribution's entropy in nats.

    Both are float32 [N] and differentiable in hidden, weight and bias. The logits are computed in the dtype of
    `hidden_NH` and `weight_VH` (which must agree), the softmax in float32.
    Example: logits [2, 1, 0], temperature 0.5, target 0: -0.142932; temperature 2: -0.680270.
    """
    assert hidden_NH.dtype == weight_VH.dtype, (hidden_NH.dtype, weight_VH.dtype)
    logprobs, entropies = _TokenLogprobs.apply(hidden_NH, weight_VH, bias_V, targets_N, 1.0 / temperature)
    return logprobs, entropies


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, inverse_temperature: float) -> Tensor:
    logits = linear(hidden, weight, bias).float()
    if inverse_temperature != 1.0:
        logits.mul_(inverse_temperature)
    return torch.log_softmax(logits, -1)


def _chunk_rows(vocab_size: int) -> int:
    return max(16, CHUNK_ELEMENTS // vocab_size)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, inverse_temperature: float
    ) -> tuple[Tensor, Tensor]:
        num_rows = hidden.shape[0]
        logprobs = hidden.new_empty(num_rows, dtype=torch.float32)
        entropies = hidden.new_empty(num_rows, dtype=torch.float32)
        step = _chunk_rows(weight.shape[0])
        for start in range(0, num_rows, step):
            part = slice(start, start + step)
            log_p = _log_softmax(hidden[part], weight, bias, inverse_temperature)
            logprobs[part] = log_p.gather(1, targets[part, None])[:, 0]
            entropies[part] = -(log_p.exp() * log_p).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, entropies)
        ctx.inverse_temperature = inverse_temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprob, grad_entropy = grads
        hidden, weight, bias, targets, entropies = ctx.saved_tensors
        if grad_logprob is None and grad_entropy is None:
            return None, None, None, None, None
        if grad_logprob is None:
            grad_logprob = torch.zeros_like(entropies)
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        step = _chunk_rows(weight.shape[0])
        for start in range(0, hidden.shape[0], step):
            part = slice(start, start + step)
            log_p = _log_softmax(hidden[part], weight, bias, ctx.inverse_temperature)
            p = log_p.exp()
            # d logprob[y] / d logits = onehot(y) - p;  d entropy / d logits = -p * (log p + entropy)
            factor = -grad_logprob[part, None]
            if grad_entropy is None:
                d_logits = p.mul_(factor)
            else:
                d_logits = p.mul_(factor - grad_entropy[part, None] * (log_p + entropies[part, None]))
            d_logits.scatter_add_(1, targets[part, None], grad_logprob[part, None])
            d_logits = d_logits.mul_(ctx.inverse_temperature).to(hidden.dtype)
            d_hidden[part] = mm(d_logits, weight)
            d_weight += mm(d_logits.t(), hidden[part])
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return d_hidden, d_weight.to(weight.dtype), None if d_bias is None else d_bias.to(weight.dtype), None, None
