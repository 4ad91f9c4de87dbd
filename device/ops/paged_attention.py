"""Paged attention: appends new keys and values to the block cache, then attends over true lengths.

One operator for decode rows and prefill chunks together. It does not allocate blocks and does not know requests.
Legend: T packed new tokens · S sequences · H query heads · G key/value heads · D head size · N blocks of the cache ·
C positions per block · M blocks per table row.
"""

from __future__ import annotations

import itertools

import torch

from rlneuron.device.ops.library import LIBRARY

LIBRARY.define(
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping, Tensor block_tables, Tensor query_starts, Tensor context_lens, "
    "float scale, int window, float softcap) -> Tensor"
)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Attention of packed new tokens over their sequences' cached positions, which it extends first.

    Args:
        query: [1, H, T, D]; key, value: [1, G, T, D], as a transformers attention module hands them over.
        key_cache: [N, G, D, C], keys transposed within their block; written in place.
        value_cache: [N, G, C, D]; written in place.
        slot_mapping: [T] int32, block * C + offset where each new token's key and value go.
        block_tables: [S, M] int32, the blocks of each sequence in order; entries beyond its length are not read.
        query_starts: [S + 1] int32, sequence s owns the packed tokens [query_starts[s], query_starts[s + 1]).
        context_lens: [S] int32, positions of s after appending; its new tokens are the last of them.
        scale: factor on the scores.
        window: 0, or how many last positions (itself included) a token sees.
        softcap: 0, or scores become softcap * tanh(scores / softcap) (Gemma 2, arXiv 2408.00118, section 2).

    Returns:
        [1, T, H, D] in the dtype of `query`; scores and sums are taken in float32.
    """
    return torch.ops.rlneuron.paged_attention(
        query,
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        block_tables,
        query_starts,
        context_lens,
        scale,
        window,
        softcap,
    )


def _plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """The operator in plain PyTorch: the definition, and what runs where there is no kernel."""
    slots = slot_mapping.long()
    block, offset = slots // key_cache.shape[3], slots % key_cache.shape[3]
    key_cache[block, :, :, offset] = key[0].transpose(0, 1)
    value_cache[block, :, offset] = value[0].transpose(0, 1)
    if query.shape[2] == context_lens.shape[0]:  # one new token each: all sequences at once
        rows = query[0].transpose(0, 1).unsqueeze(2)
        return _attend(rows, key_cache, value_cache, block_tables, context_lens, scale, window, softcap).transpose(0, 1)
    starts = query_starts.tolist()
    parts = [
        _attend(
            query[0, :, begin:end].unsqueeze(0),
            key_cache,
            value_cache,
            block_tables[s : s + 1],
            context_lens[s : s + 1],
            scale,
            window,
            softcap,
        )
        for s, (begin, end) in enumerate(itertools.pairwise(starts))
        if end > begin
    ]
    return torch.cat(parts, dim=1)


def _attend(
    query_SHQD: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Q new tokens of each of S sequences -> [S, Q, H, D]."""
    sequences, heads, length, size = query_SHQD.shape
    groups = key_cache.shape[1]
    width = block_tables.shape[1] * key_cache.shape[3]
    # Entries beyond a sequence's length may be anything; any block will do, its positions are masked below.
    tables = block_tables.long().clamp(0, key_cache.shape[0] - 1)
    key_SGDK = key_cache[tables].permute(0, 2, 3, 1, 4).reshape(sequences, groups, size, width).float()
    value_SGKD = value_cache[tables].permute(0, 2, 1, 3, 4).reshape(sequences, groups, width, size).float()
    grouped = query_SHQD.float().reshape(sequences, groups, heads // groups * length, size)
    scores = (grouped @ key_SGDK * scale).view(sequences, groups, heads // groups, length, width)
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(width, device=query_SHQD.device)
    newest = torch.arange(length, device=query_SHQD.device) - (length - 1)
    last_SQ = context_lens.long()[:, None] - 1 + newest[None, :]
    visible = position <= last_SQ[..., None]
    if window > 0:
        visible = visible & (position > last_SQ[..., None] - window)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    # Stale blocks may hold NaN, and 0 * NaN is NaN: values nobody sees are set to 0.
    value_SGKD = value_SGKD.masked_fill(~visible.any(1)[:, None, :, None], 0.0)
    weights = torch.softmax(scores, dim=-1).view(sequences, groups, heads // groups * length, width)
    out = (weights @ value_SGKD).view(sequences, heads, length, size)
    return out.transpose(1, 2).to(query_SHQD.dtype)


@torch.library.register_fake("rlneuron::paged_attention", lib=LIBRARY)
def _fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    return query.new_empty((1, query.shape[2], query.shape[1], query.shape[3]))


LIBRARY.impl("paged_attention", _plain, "CompositeExplicitAutograd")
