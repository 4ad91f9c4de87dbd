"""The running sequences as arrays, one row per slot, so that a step touches them without a loop over sequences.

It schedules nothing. Arrays grow by columns when a longer request comes; they live on the host and hold no tensors.
"""

from __future__ import annotations

import numpy as np

from rlneuron.rollout.sequence import Sequence


class Slots:
    """`count` rows; those of `sequences[i] is None` are free."""

    def __init__(self, count: int, block_size: int) -> None:
        self.block_size = block_size
        self.sequences: list[Sequence | None] = [None] * count
        self._free = list(range(count - 1, -1, -1))
        self.tokens = np.zeros((count, 0), dtype=np.int32)
        self.logprobs = np.zeros((2, count, 0), dtype=np.float32)  # at the column of their token
        self.block_table = np.zeros((count, 0), dtype=np.int32)
        self.num_tokens = np.zeros(count, dtype=np.int32)
        self.num_computed = np.zeros(count, dtype=np.int32)  # positions in the cache, while prefilling
        self.num_blocks = np.zeros(count, dtype=np.int32)
        self.prompt_len = np.zeros(count, dtype=np.int32)
        self.max_len = np.zeros(count, dtype=np.int32)
        self.min_len = np.zeros(count, dtype=np.int32)
        self.node = np.full(count, -1, dtype=np.int64)  # identity of the registered prefix, -1: none may be registered
        self.key = np.zeros(count, dtype=np.uint64)
        self.temperature = np.ones(count, dtype=np.float32)
        self.top_k = np.zeros(count, dtype=np.int32)
        self.top_p = np.ones(count, dtype=np.float32)
        self.min_p = np.zeros(count, dtype=np.float32)
        self.penalty = np.ones(count, dtype=np.float32)
        self.filtered = np.zeros(count, dtype=bool)
        self.ignore_eos = np.zeros(count, dtype=bool)
        self.has_stops = np.zeros(count, dtype=bool)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def _ensure_columns(self, length: int) -> None:
        have = self.tokens.shape[1]
        if length <= have:
            return
        size = self.block_size
        columns = -(-max(length, 2 * have) // size) * size
        self.tokens = np.pad(self.tokens, ((0, 0), (0, columns - have)))
        self.logprobs = np.pad(self.logprobs, ((0, 0), (0, 0), (0, columns - have)))
        self.block_table = np.pad(self.block_table, ((0, 0), (0, (columns - have) // size)))

    def admit(self, sequence: Sequence) -> int:
        """Puts a sequence into a free slot, with no blocks yet; returns the slot."""
        slot = self._free.pop()
        params, prompt_len, length = sequence.request.params, len(sequence.request.prompt), len(sequence.token_ids)
        self._ensure_columns(prompt_len + params.max_tokens)
        self.sequences[slot] = sequence
        self.tokens[slot, :length] = sequence.token_ids
        self.logprobs[:, slot, prompt_len:length] = sequence.logprobs
        self.num_tokens[slot] = length
        self.num_computed[slot] = 0
        self.num_blocks[slot] = 0
        self.prompt_len[slot] = prompt_len
        self.max_len[slot] = prompt_len + params.max_tokens
        self.min_len[slot] = prompt_len + params.min_tokens
        self.node[slot] = -1
        self.key[slot] = sequence.keys[0]
        self.temperature[slot] = 0.0 if params.greedy else params.temperature
        self.top_k[slot] = max(params.top_k, 0)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.penalty[slot] = params.repetition_penalty
        self.filtered[slot] = params.filtered
        self.ignore_eos[slot] = params.ignore_eos
        self.has_stops[slot] = bool(params.stop_token_ids)
        return slot

    def fork(self, parent: int, sequence: Sequence) -> int:
        """A slot for another sample of `parent`'s request, sharing its blocks (the caller counts references)."""
        slot = self.admit(sequence)
        blocks = self.num_blocks[parent]
        self.block_table[slot, :blocks] = self.block_table[parent, :blocks]
        self.num_blocks[slot] = blocks
        self.num_computed[slot] = self.num_computed[parent]
        self.node[slot] = self.node[parent]
        return slot

    def blocks(self, slot: int) -> np.ndarray:
        """The blocks of a slot, in order [num_blocks] int32."""
        return self.block_table[slot, : self.num_blocks[slot]]

    def retire(self, slot: int) -> Sequence:
        """Empties a slot; the sequence it returns carries all its tokens and log-probabilities."""
        sequence = self.sequences[slot]
        assert sequence is not None, "retire() of an empty slot"
        length, prompt_len = int(self.num_tokens[slot]), int(self.prompt_len[slot])
        sequence.token_ids = self.tokens[slot, :length].copy()
        sequence.logprobs = self.logprobs[:, slot, prompt_len:length].copy()
        self.sequences[slot] = None
        self.num_blocks[slot] = 0
        self._free.append(slot)
        return sequence
