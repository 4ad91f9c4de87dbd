"""Decides what the next forward pass computes, and owns slots and blocks. It runs nothing and samples nothing.

Continuous batching: every running sequence that has its prompt computed decodes one token; what is left of the token
budget goes to prefill chunks, first of sequences already admitted, then of waiting ones in order of arrival (nobody
is overtaken, so nobody starves). When blocks run out the latest admitted sequence is preempted: it gives its blocks
back and is computed again later, with the same random numbers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rlneuron.rollout.blocks import BlockPool
from rlneuron.rollout.outputs import EngineStats
from rlneuron.rollout.sequence import Request, Sequence
from rlneuron.rollout.slots import Slots


@dataclass(slots=True, eq=False)
class Chunk:
    """`length` consecutive tokens of a slot from position `start`; its last row is sampled into `samples`."""

    slot: int
    start: int
    length: int
    samples: list[int]
    """Slots that draw from the last row: none before the prompt is complete, then one per sample."""


@dataclass(slots=True, eq=False)
class Step:
    """One forward pass."""

    decode: np.ndarray
    """Slots that compute their last token, [*] int64."""
    chunks: list[Chunk]
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(from, to): blocks to copy before anything is written."""

    @property
    def sampled(self) -> np.ndarray:
        """Slots in the order in which they are sampled: decoding ones, then those of the chunks."""
        tail = [slot for chunk in self.chunks for slot in chunk.samples]
        return np.concatenate([self.decode, np.array(tail, dtype=np.int64)]) if tail else self.decode


class Scheduler:
    """See the module; `max_num_batched_tokens` is the most tokens one step computes."""

    def __init__(
        self,
        slots: Slots,
        pool: BlockPool,
        stats: EngineStats,
        *,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool,
    ) -> None:
        self.slots = slots
        self.pool = pool
        self.stats = stats
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.waiting: deque[Sequence] = deque()
        self.running: list[int] = []  # slots in order of admission, samples of a prompt side by side
        self._prefilling: dict[int, None] = {}
        self._pending_forks = 0  # slots promised to samples whose prompt is being computed
        self._decode: np.ndarray | None = None

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> Step:
        """The next step; every block it writes into is allocated and its own."""
        copies = self._grow()
        step = Step(self._decode_slots(), [], copies)
        budget = self.max_num_batched_tokens - len(step.decode)
        for slot in list(self._prefilling):
            budget -= self._chunk(step, slot, budget)
        while budget > 0 and self.waiting and (admitted := self._admit()) is not None:
            budget -= self._chunk(step, admitted, budget)
        self._register_decoded(step.decode)
        self.stats.decode_tokens += len(step.decode)
        self.stats.prefill_tokens += sum(chunk.length for chunk in step.chunks)
        return step

    def _decode_slots(self) -> np.ndarray:
        if self._decode is None:
            ready = [slot for slot in self.running if slot not in self._prefilling]
            self._decode = np.array(ready, dtype=np.int64)
        return self._decode

    def _grow(self) -> list[tuple[int, int]]:
        """Gives every decoding slot a block of its own to write into, preempting until there are enough."""
        slots, pool, size = self.slots, self.pool, self.pool.block_size
        while True:
            decode = self._decode_slots()
            position = slots.num_tokens[decode] - 1
            index = position // size
            fresh = index >= slots.num_blocks[decode]
            shared = ~fresh & (pool.references[slots.block_table[decode, index]] > 1)
            if int(fresh.sum()) + int(shared.sum()) <= pool.num_free:
                break
            self._preempt(self.running[-1])
        for slot in decode[fresh]:
            slots.block_table[slot, slots.num_blocks[slot]] = pool.allocate()
            slots.num_blocks[slot] += 1
        copies: list[tuple[int, int]] = []
        for slot, i in zip(decode[shared], index[shared], strict=True):
            block = int(slots.block_table[slot, i])
            if pool.references[block] > 1:  # the last of the sharers keeps the block itself
                own = pool.allocate()
                copies.append((block, own))
                pool.release(block)
                slots.block_table[slot, i] = own
        self.stats.copied_blocks += len(copies)
        return copies

    def _admit(self) -> int | None:
        """Moves the first waiting sequence into a slot with blocks for all its tokens, or returns None."""
        sequence, pool = self.waiting[0], self.pool
        if len(sequence.keys) > self.slots.num_free - self._pending_forks:
            return None
        hits, node = self._cached_prefix(sequence.token_ids)
        total = -(-len(sequence.token_ids) // pool.block_size)
        idle_hits = int((pool.references[np.array(hits, dtype=np.int64)] == 0).sum())
        # One block in a hundred stays free for the running sequences, so that admission does not cause preemption.
        reserve = pool.num_blocks // 100 + 1 if self.running else 0
        if total - len(hits) + idle_hits + reserve > pool.num_free:
            return None
        self.waiting.popleft()
        slot = self.slots.admit(sequence)
        for block in hits:
            pool.retain(block)
        blocks = hits + [pool.allocate() for _ in range(total - len(hits))]
        self.slots.block_table[slot, :total] = blocks
        self.slots.num_blocks[slot] = total
        self.slots.num_computed[slot] = len(hits) * pool.block_size
        self.slots.node[slot] = node
        self.running.append(slot)
        self._prefilling[slot] = None
        self._pending_forks += len(sequence.keys) - 1
        self.stats.prefix_hit_tokens += len(hits) * pool.block_size
        if sequence.num_generated == 0:
            sequence.request.num_cached_tokens = len(hits) * pool.block_size
        return slot

    def _cached_prefix(self, token_ids: np.ndarray) -> tuple[list[int], int]:
        """Known full blocks at the beginning, and the identity of that prefix; at least one token is left over."""
        node, hits = self.pool.root, list[int]()
        if not self.enable_prefix_caching:
            return hits, -1
        size = self.pool.block_size
        for begin in range(0, (len(token_ids) - 1) // size * size, size):
            block = self.pool.find(node, token_ids[begin : begin + size])
            if block is None:
                break
            hits.append(block)
            node = self.pool.node(block)
        return hits, node

    def _chunk(self, step: Step, slot: int, budget: int) -> int:
        """Adds the next chunk of a prefilling slot to the step; returns its length."""
        slots = self.slots
        start, end = int(slots.num_computed[slot]), int(slots.num_tokens[slot])
        length = min(end - start, budget)
        if length <= 0:
            return 0
        slots.num_computed[slot] = start + length
        self._register(slot, start, start + length)
        complete = start + length == end
        step.chunks.append(Chunk(slot, start, length, self._fork(slot) if complete else []))
        return length

    def _fork(self, slot: int) -> list[int]:
        """The prompt of `slot` is complete with this step: every sample gets a slot and shares its blocks."""
        leader = self.slots.sequences[slot]
        assert leader is not None, "a prefilling slot is empty"
        forks = []
        for offset, key in enumerate(leader.keys[1:], 1):
            child = Sequence(leader.request, leader.index + offset, [key], leader.token_ids)
            forks.append(self.slots.fork(slot, child))
        self._pending_forks -= len(forks)
        self.pool.references[self.slots.blocks(slot)] += len(forks)
        del leader.keys[1:]
        place = self.running.index(slot) + 1
        self.running[place:place] = forks
        del self._prefilling[slot]
        self._decode = None
        return [slot, *forks]

    def _register_decoded(self, decode: np.ndarray) -> None:
        length = self.slots.num_tokens[decode]
        for slot in decode[length % self.pool.block_size == 0]:
            self._register(int(slot), int(self.slots.num_tokens[slot]) - 1, int(self.slots.num_tokens[slot]))

    def _register(self, slot: int, start: int, end: int) -> None:
        """Makes the blocks findable that computing positions [start, end) completes."""
        slots, size = self.slots, self.pool.block_size
        if slots.node[slot] < 0:
            return
        for i in range(start // size, end // size):
            tokens = slots.tokens[slot, i * size : (i + 1) * size]
            slots.node[slot] = self.pool.register(int(slots.node[slot]), tokens, int(slots.block_table[slot, i]))

    def advance(self, sampled: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Appends what was sampled: tokens [R] int32 and logprobs [2, R] of the slots `sampled` [R]."""
        slots = self.slots
        column = slots.num_tokens[sampled]
        slots.tokens[sampled, column] = tokens
        slots.logprobs[:, sampled, column] = logprobs
        slots.num_tokens[sampled] = column + 1

    def finish(self, finished: list[int]) -> list[Sequence]:
        """Frees slots and blocks of `finished`; returns their sequences."""
        gone = set(finished)
        self.running = [slot for slot in self.running if slot not in gone]
        self._decode = None
        return [self._vacate(slot) for slot in finished]

    def _vacate(self, slot: int) -> Sequence:
        # Last block first: the beginning of a prefix is the part worth keeping longest.
        for block in self.slots.blocks(slot)[::-1]:
            self.pool.release(int(block))
        if slot in self._prefilling:
            del self._prefilling[slot]
            sequence = self.slots.sequences[slot]
            assert sequence is not None, "a prefilling slot is empty"
            self._pending_forks -= len(sequence.keys) - 1
        return self.slots.retire(slot)

    def _preempt(self, slot: int) -> None:
        """Takes slot and blocks away; the sequence is the next to be admitted again."""
        self.stats.preemptions += 1
        self.waiting.extendleft(self.finish([slot]))

    def abort(self, request: Request) -> list[Sequence]:
        """Removes all sequences of a request, waiting or running; returns them."""
        waiting = [s for s in self.waiting if s.request is request]
        if waiting:
            self.waiting = deque(s for s in self.waiting if s.request is not request)
        running = [i for i in self.running if (s := self.slots.sequences[i]) is not None and s.request is request]
        return waiting + self.finish(running)

    def reset_prefix_cache(self) -> None:
        """No block computed before is found again; running sequences keep theirs, to themselves."""
        self.pool.reset_cache()
        self.slots.node[:] = -1
