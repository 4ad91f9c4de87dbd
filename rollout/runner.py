"""Runs one step: packs its tokens, runs the module on the paged cache, samples. It decides nothing.

Caches, weights and every per-step tensor live on the device; token ids and two log-probabilities per draw come back.
The per-step input is one int32 and one float32 buffer, each copied to the device once.
Legend: T packed tokens · S sequences of the step · R draws · V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from rlneuron.device.ops.sampling import sample_tokens
from rlneuron.rollout.attention import PagedContext, PagedModel
from rlneuron.rollout.sampling import SeenTokens, uniforms
from rlneuron.rollout.scheduler import Step
from rlneuron.rollout.slots import Slots


class Runner:
    """Holds the caches: per layer keys [N, G, D, C] (transposed within the block) and values [N, G, C, D]."""

    def __init__(
        self, model: PagedModel, slots: Slots, device: torch.device, eos_token_ids: np.ndarray, *, num_blocks: int
    ) -> None:
        self.model = model
        self.slots = slots
        self.device = device
        self.eos_token_ids = eos_token_ids
        size = slots.block_size
        self.key_caches = [
            torch.empty((num_blocks, s.kv_heads, s.head_size, size), dtype=s.dtype, device=device) for s in model.layers
        ]
        self.value_caches = [
            torch.empty((num_blocks, s.kv_heads, size, s.head_size), dtype=s.dtype, device=device) for s in model.layers
        ]
        self.seen = SeenTokens(len(slots.sequences), model.vocab_size, device)

    def run(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """Computes a step; returns the drawn tokens [R] int32 and log-probabilities [2, R] of `step.sampled`."""
        if step.copies:
            self._copy_blocks(step.copies)
        logits = self._forward(step)
        return self._sample(step, logits)

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        pairs = torch.tensor(copies, dtype=torch.int64).to(self.device)
        source, target = pairs[:, 0], pairs[:, 1]
        for cache in (*self.key_caches, *self.value_caches):
            cache.index_copy_(0, target, cache.index_select(0, source))

    def _forward(self, step: Step) -> torch.Tensor:
        """Logits [rows, V]: decoding slots first, then the last token of each chunk that is sampled."""
        slots, size = self.slots, self.slots.block_size
        rows = [step.decode]
        positions = [slots.num_tokens[step.decode] - 1]
        for chunk in step.chunks:
            rows.append(np.full(chunk.length, chunk.slot))
            positions.append(np.arange(chunk.start, chunk.start + chunk.length, dtype=np.int32))
        row, position = np.concatenate(rows), np.concatenate(positions)
        owners = np.concatenate([step.decode, np.array([c.slot for c in step.chunks], dtype=np.int64)])
        lengths = np.array([1] * len(step.decode) + [c.length for c in step.chunks], dtype=np.int32)
        starts = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        context = position[starts[1:] - 1] + 1
        table = slots.block_table[owners, : -(-int(context.max()) // size)]
        slot_mapping = slots.block_table[row, position // size] * size + position % size
        keep = np.zeros(0, dtype=np.int32)
        if step.chunks:
            ends = [i for i, chunk in enumerate(step.chunks, len(step.decode)) if chunk.samples]
            keep = np.concatenate([starts[: len(step.decode)], starts[1:][np.array(ends, dtype=np.int64)] - 1])
            if len(keep) == 0:  # no prompt is complete yet; the head needs at least one row
                keep = starts[:1]
        ids, pos, mapped, begin, length, tables, kept = self._upload(
            slots.tokens[row, position], position, slot_mapping, starts, context, table.reshape(-1), keep
        )
        tables = tables.view(table.shape)
        paged = PagedContext(self.key_caches, self.value_caches, mapped, tables, begin, length)
        return self.model.forward(ids, pos, paged, kept.long() if step.chunks else None)

    def _upload(self, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Arrays of one dtype as views of one device buffer."""
        buffer = torch.from_numpy(np.concatenate(arrays)).to(self.device)
        return buffer.split([len(a) for a in arrays])

    def _sample(self, step: Step, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        slots, sampled = self.slots, step.sampled
        if len(sampled) == 0:
            return np.zeros(0, dtype=np.int32), np.zeros((2, 0), dtype=np.float32)
        rows = np.arange(len(sampled), dtype=np.int32)
        done = [chunk for chunk in step.chunks if chunk.samples]
        if done:  # all samples of a prompt read the same row
            counts = [1] * len(step.decode) + [len(chunk.samples) for chunk in done]
            rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        numbers = uniforms(slots.key[sampled], slots.num_tokens[sampled] - slots.prompt_len[sampled])
        filters: dict[str, torch.Tensor] = {}
        penalised = np.zeros(0, dtype=np.int64)
        if slots.filtered[sampled].any():
            filters, penalised = self._filters(step, sampled)
        number, temperature = self._upload(numbers, slots.temperature[sampled])
        (row,) = self._upload(rows)
        with torch.inference_mode():
            tokens, logprobs = sample_tokens(logits, row, number, temperature, **filters)
            if len(penalised):
                assert self.seen.table is not None, "a penalty without its table"
                index = torch.from_numpy(penalised).to(self.device)
                owner = torch.from_numpy(sampled[penalised]).to(self.device)
                self.seen.table[owner, tokens[index].long()] = True
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def _filters(self, step: Step, sampled: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        """The arguments of `sample_tokens` beyond the temperature, and which draws have a penalty."""
        slots = self.slots
        top_p, min_p, penalty = self._upload(slots.top_p[sampled], slots.min_p[sampled], slots.penalty[sampled])
        (top_k,) = self._upload(slots.top_k[sampled])
        filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        penalised = np.flatnonzero(slots.penalty[sampled] != 1.0)
        if len(penalised):
            for slot in (s for chunk in step.chunks for s in chunk.samples if slots.penalty[s] != 1.0):
                self.seen.load(slot, slots.tokens[slot, : slots.num_tokens[slot]])
            assert self.seen.table is not None, "a penalised slot was never loaded"
            (owners,) = self._upload(sampled.astype(np.int32))
            filters |= {"penalty": penalty, "seen": self.seen.table, "seen_rows": owners}
        early = np.flatnonzero(slots.num_tokens[sampled] < slots.min_len[sampled])
        if len(early):
            filters["banned"] = torch.from_numpy(self._banned(sampled, early)).to(self.device)
        return filters, penalised

    def _banned(self, sampled: np.ndarray, early: np.ndarray) -> np.ndarray:
        """[R, E] int32: what ends a completion, for the draws `early` that may not end yet; -1 elsewhere."""
        lists: list[list[int]] = [[] for _ in sampled]
        for i in early:
            sequence = self.slots.sequences[sampled[i]]
            assert sequence is not None, "an empty slot is sampled"
            params = sequence.request.params
            lists[i] = [*params.stop_token_ids, *([] if params.ignore_eos else self.eos_token_ids.tolist())]
        width = max(1, *map(len, lists))
        return np.array([ids + [-1] * (width - len(ids)) for ids in lists], dtype=np.int32)
