"""The pool of KV blocks: reference counts, prefix cache, least-recently-used eviction. It holds no tensors.

A block is in one of three places: referenced (`references > 0`), cached (nobody refers to it, but it still holds the
keys and values of a known prefix) or free. A cached block is found by everything that determines its content: the
tokens in it, all tokens before them, and the weights (and salt) they were computed with. The key holds the tokens
themselves and the identity of the preceding cached block, not a hash, so there are no collisions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

Key = tuple[int, bytes]


class BlockPool:
    """`num_blocks` blocks of `block_size` positions."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.references = np.zeros(num_blocks, dtype=np.int32)
        # Free blocks are a stack: the one freed last is the one most likely still in the CPU's cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced but findable, oldest first
        self._by_key: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._node_of: dict[int, int] = {}  # block -> identity of the prefix that ends with it
        self._next_node = 0
        self._root = self._new_node()

    def _new_node(self) -> int:
        self._next_node += 1
        return self._next_node

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, evicting cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def root(self) -> int:
        """Identity of the empty prefix under the present weights."""
        return self._root

    def allocate(self) -> int:
        """A block with one reference; evicts the cached block unused for longest when none is free."""
        if self._free:
            block = self._free.pop()
        else:
            assert self._cached, "allocate() called with no free block"
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self.references[block] = 1
        return block

    def retain(self, block: int) -> None:
        """One more reference to `block`, which may be cached."""
        if self.references[block] == 0:
            del self._cached[block]
        self.references[block] += 1

    def release(self, block: int) -> None:
        """One reference less; the last one makes the block cached or free."""
        assert self.references[block] > 0, "release() of a block nobody refers to"
        self.references[block] -= 1
        if self.references[block] == 0:
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def find(self, parent: int, tokens: np.ndarray) -> int | None:
        """The block holding `tokens` (int32, block_size of them) after the prefix `parent`, if it is known."""
        return self._by_key.get((parent, tokens.tobytes()))

    def node(self, block: int) -> int:
        """Identity of the prefix that ends with the registered block."""
        return self._node_of[block]

    def register(self, parent: int, tokens: np.ndarray, block: int) -> int:
        """Makes a full, referenced block findable; returns the identity of the prefix that it ends.

        When another block already holds the same prefix that one stays, and its identity is returned.
        """
        key = (parent, tokens.tobytes())
        known = self._by_key.get(key)
        if known is not None:
            return self._node_of[known]
        assert self.references[block] > 0 and block not in self._key_of, "register() of a free or known block"
        self._by_key[key] = block
        self._key_of[block] = key
        self._node_of[block] = self._new_node()
        return self._node_of[block]

    def _forget(self, block: int) -> None:
        del self._by_key[self._key_of.pop(block)]
        del self._node_of[block]

    def reset_cache(self) -> None:
        """Forgets every prefix: no block computed before this call is found again. References stay."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._by_key.clear()
        self._key_of.clear()
        self._node_of.clear()
        self._root = self._new_node()

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Asserts the invariants, given every table of referenced blocks: no leak, no double use."""
        counts = np.zeros(self.num_blocks, dtype=np.int64)
        for table in tables:
            for block in table:
                counts[block] += 1
        assert (counts == self.references).all(), "references differ from the tables"
        unreferenced = [*self._free, *self._cached]
        assert len(unreferenced) == len(set(unreferenced)), "a block is free twice"
        assert {int(b) for b in np.flatnonzero(self.references == 0)} == set(unreferenced), "a block leaked"
        assert set(self._by_key.values()) == set(self._key_of) == set(self._node_of), "the prefix index is broken"
        assert set(self._cached) <= set(self._key_of), "a cached block cannot be found"
