"""The rollout workload: prompts of 32 to 128 tokens, several samples each with 64 to 256 forced new tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """One sequence: its prompt, which prompt that is, and how many tokens it must generate."""

    prompt: list[int]
    prompt_index: int
    num_tokens: int


def workload(vocab_size: int, num_prompts: int = 16, num_samples: int = 8, seed: int = 0) -> list[Wanted]:
    """Sequences in order of their prompts; the same for every engine. Token ids 0 and 1 are left out (pad, bos)."""
    draw = random.Random(seed)
    sequences = []
    for index in range(num_prompts):
        prompt = [draw.randint(2, vocab_size - 1) for _ in range(draw.randint(32, 128))]
        for _ in range(num_samples):
            sequences.append(Wanted(prompt=prompt, prompt_index=index, num_tokens=draw.randint(64, 256)))
    return sequences
