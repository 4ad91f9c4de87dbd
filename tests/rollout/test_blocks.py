"""The block pool under random use: no leak, no double use, and a prefix is found only when everything is equal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlneuron.rollout.blocks import BlockPool

SIZE = 2


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


class PoolMachine(RuleBasedStateMachine):
    """Sequences of full blocks over a tiny alphabet, so that prefixes meet; `content` is what was written where."""

    @initialize(blocks=st.integers(2, 12))
    def start(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, SIZE)
        self.tables: list[list[int]] = []
        self.content: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.generation = 0

    @rule(ids=st.lists(st.integers(0, 1), min_size=SIZE, max_size=4 * SIZE))
    def admit(self, ids: list[int]) -> None:
        """As the scheduler does: find, retain, allocate the rest, write, register."""
        node, table, known = self.pool.root, list[int](), True
        full = len(ids) // SIZE
        for i in range(full):
            block = self.pool.find(node, tokens(*ids[i * SIZE : (i + 1) * SIZE])) if known else None
            prefix = (self.generation, tuple(ids[: (i + 1) * SIZE]))
            if block is None:
                known = False
                if self.pool.num_free == 0:
                    break
                block = self.pool.allocate()
                assert all(block not in other for other in [*self.tables, table]), "a block in use was handed out"
                self.content[block] = prefix
                node = self.pool.register(node, tokens(*ids[i * SIZE : (i + 1) * SIZE]), block)
            else:
                assert self.content[block] == prefix, "a cached block holds another prefix"
                self.pool.retain(block)
                node = self.pool.node(block)
            table.append(block)
        if table:
            self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        for block in reversed(table):
            self.pool.release(block)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        for block in table:
            self.pool.retain(block)
        self.tables.append(list(table))

    @rule()
    def reset(self) -> None:
        self.pool.reset_cache()
        self.generation += 1

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(self.tables)
            used = {block for table in self.tables for block in table}
            assert self.pool.num_free == self.pool.num_blocks - len(used)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for table in self.tables:
                for block in table:
                    self.pool.release(block)
            self.pool.check([])
            assert self.pool.num_free == self.pool.num_blocks


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = BlockPool(2, SIZE)
    first, second = pool.allocate(), pool.allocate()
    pool.register(pool.root, tokens(1, 1), first)
    pool.register(pool.root, tokens(2, 2), second)
    pool.release(first)
    pool.release(second)
    pool.retain(first)  # used again, so the other one is older now
    pool.release(first)
    assert pool.allocate() == second
    assert pool.find(pool.root, tokens(2, 2)) is None and pool.find(pool.root, tokens(1, 1)) == first


def test_equal_tokens_after_another_prefix_are_not_found() -> None:
    pool = BlockPool(4, SIZE)
    a, b = pool.allocate(), pool.allocate()
    node = pool.register(pool.root, tokens(1, 1), a)
    pool.register(node, tokens(7, 7), b)
    assert pool.find(node, tokens(7, 7)) == b
    assert pool.find(pool.root, tokens(7, 7)) is None
    old_root = pool.root
    pool.reset_cache()
    assert pool.root != old_root and pool.find(old_root, tokens(1, 1)) is None


def test_misuse_is_caught() -> None:
    pool = BlockPool(1, SIZE)
    block = pool.allocate()
    with pytest.raises(AssertionError, match="no free block"):
        pool.allocate()
    pool.release(block)
    with pytest.raises(AssertionError, match="nobody refers"):
        pool.release(block)
    pool.allocate()
    with pytest.raises(AssertionError, match="references differ"):
        pool.check([])
