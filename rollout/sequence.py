"""A request, and a sequence of it while it waits: plain records that the scheduler moves in and out of slots."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rlneuron.rollout.outputs import Completion, RequestOutput
from rlneuron.rollout.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """One prompt, how to sample it, and the completions collected so far."""

    request_id: str
    prompt: np.ndarray  # [P] int32
    params: SamplingParams
    outputs: list[Completion | None]
    num_cached_tokens: int = 0
    aborted: bool = False

    @property
    def finished(self) -> bool:
        return all(output is not None for output in self.outputs)

    def to_output(self) -> RequestOutput:
        """The finished request as the caller sees it."""
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt.tolist(),
            outputs=[output for output in self.outputs if output is not None],
            num_cached_tokens=self.num_cached_tokens,
        )


@dataclass(slots=True, eq=False)
class Sequence:
    """A stretch of tokens with its generated part, as it waits for a slot.

    A new request waits as one sequence with `keys` of all its samples: their common prompt is computed once and
    forked when it is done. A preempted sequence waits alone, with what it has generated.
    """

    request: Request
    index: int
    """Sample index of the first key; the others follow."""
    keys: list[int]
    """One 64-bit stream of random numbers per sample."""
    token_ids: np.ndarray  # [prompt + generated] int32
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros((2, 0), dtype=np.float32))  # [2, generated]
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(first generated token, weight version): which weights produced which tokens."""

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.request.prompt)

    def weight_versions(self) -> list[int]:
        """The weight version of every generated token."""
        if not self.versions:  # nothing was generated
            return []
        bounds = [start for start, _ in self.versions[1:]] + [self.num_generated]
        result: list[int] = []
        for (_, version), end in zip(self.versions, bounds, strict=True):
            result += [version] * (end - len(result))
        return result
