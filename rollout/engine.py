"""Engine: requests in, one step at a time, finished requests out.

It owns the loop's state (scheduler, runner, weights, version) and turns finished sequences into completions. It does
not tokenise: `llm.py` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from rlneuron.rollout.attention import LayerSpec, PagedModel
from rlneuron.rollout.blocks import BlockPool
from rlneuron.rollout.outputs import Completion, EngineStats, FinishReason, RequestOutput
from rlneuron.rollout.runner import Runner
from rlneuron.rollout.sampling import mix64, stream_keys
from rlneuron.rollout.sampling_params import SamplingParams
from rlneuron.rollout.scheduler import Scheduler, Step
from rlneuron.rollout.sequence import Request, Sequence
from rlneuron.rollout.slots import Slots
from rlneuron.rollout.weights import WeightTable

# Of an accelerator's memory the cache takes at most this share, like vLLM on Neuron (its KV budget cap).
_MEMORY_SHARE = 0.30
_CPU_CACHE_BYTES = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Budgets of an engine."""

    max_num_seqs: int = 128
    """Most sequences that run at the same time."""
    max_num_batched_tokens: int = 2048
    """Most tokens one step computes; longer prompts are computed in chunks."""
    block_size: int = 16
    """Positions per block of the cache, a multiple of 16."""
    num_blocks: int | None = None
    """Blocks of the cache; None: what max_num_seqs sequences can use, at most 30 % of the device (1 GiB on a CPU)."""
    enable_prefix_caching: bool = True
    """Whether the blocks of a known prefix are used again."""
    max_model_len: int | None = None
    """Most positions of a sequence; None: the model's max_position_embeddings."""
    seed: int = 0
    """Source of the random numbers of requests without a seed."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "num_blocks", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; give a whole number of at least 1.")
        if self.block_size < 16 or self.block_size % 16:
            raise ValueError(f"block_size is {self.block_size}; give a multiple of 16.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens} but max_num_seqs is {self.max_num_seqs}; "
                "every running sequence needs one token per step."
            )


class Engine:
    """See the module. `decode` turns a completion's token ids into text."""

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        config: EngineConfig,
        eos_token_ids: Seq[int] = (),
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.version = 0
        self._decode = decode
        self._model = PagedModel(model.to(device))
        self._weights = WeightTable(model)
        limit = self._model.max_positions
        self.max_model_len: int = config.max_model_len or limit or 2**20
        if limit is not None and self.max_model_len > limit:
            raise ValueError(f"max_model_len is {self.max_model_len} but the model has {limit} positions.")
        self.eos_token_ids = np.array(sorted(set(eos_token_ids)), dtype=np.int64)
        self._check_tokens("eos_token_ids", self.eos_token_ids)
        num_blocks = config.num_blocks or _default_num_blocks(self._model.layers, device, config, self.max_model_len)
        self.stats = EngineStats(num_blocks=num_blocks, num_free_blocks=num_blocks)
        self._pool = BlockPool(num_blocks, config.block_size)
        self._slots = Slots(config.max_num_seqs, config.block_size)
        self._scheduler = Scheduler(
            self._slots,
            self._pool,
            self.stats,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._runner = Runner(self._model, self._slots, device, self.eos_token_ids, num_blocks=num_blocks)
        self._requests: dict[str, Request] = {}
        self._num_added = 0

    @property
    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished

    def add_request(self, request_id: str, prompt_token_ids: Seq[int], params: SamplingParams) -> None:
        """Queues a request; one that cannot run here is refused at once (ValueError with both numbers)."""
        prompt = np.array(prompt_token_ids, dtype=np.int64)
        self._check_request(request_id, prompt, params)
        request = Request(request_id, prompt.astype(np.int32), params, [None] * params.n)
        seed = params.seed if params.seed is not None else mix64(self.config.seed) ^ mix64(~self._num_added)
        self._num_added += 1
        self._requests[request_id] = request
        keys = stream_keys(seed, params.n)
        # More samples than slots wait as several sequences; the prefix cache saves them most of the prompt.
        for begin in range(0, params.n, self.config.max_num_seqs):
            part = keys[begin : begin + self.config.max_num_seqs]
            self._scheduler.add(Sequence(request, begin, part, request.prompt))
        self._count()

    def _check_request(self, request_id: str, prompt: np.ndarray, params: SamplingParams) -> None:
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is in use; give every running request its own.")
        if prompt.ndim != 1 or len(prompt) == 0:
            raise ValueError(f"the prompt of request {request_id!r} has no tokens; give at least one.")
        self._check_tokens(f"the prompt of request {request_id!r}", prompt)
        stops = np.array(params.stop_token_ids, dtype=np.int64)
        self._check_tokens(f"stop_token_ids of request {request_id!r}", stops)
        wanted = len(prompt) + params.max_tokens
        asked = (
            f"request {request_id!r} asks for {len(prompt)} prompt tokens + max_tokens {params.max_tokens} = {wanted}"
        )
        if wanted > self.max_model_len:
            raise ValueError(f"{asked} positions; the model has {self.max_model_len} (max_model_len).")
        # The last token is never an input, so it needs no place in the cache.
        blocks, size = -(-(wanted - 1) // self.config.block_size), self.config.block_size
        if blocks > self._pool.num_blocks:
            raise ValueError(
                f"{asked} tokens, {blocks} blocks of {size}; the cache has {self._pool.num_blocks} (num_blocks)."
            )

    def _check_tokens(self, what: str, ids: np.ndarray) -> None:
        wrong = ids[(ids < 0) | (ids >= self._model.vocab_size)]
        if len(wrong):
            raise ValueError(f"{what} holds token id {wrong[0]}; the model has ids 0 to {self._model.vocab_size - 1}.")

    def step(self) -> list[RequestOutput]:
        """Computes one step of whatever runs; returns the requests that it finished.

        When the model fails (out of memory, NaN in the logits) all requests are dropped before the error is raised.
        """
        if not self.has_unfinished:
            return []
        try:
            step = self._scheduler.schedule()
            tokens, logprobs = self._runner.run(step)
            return self._postprocess(step, tokens, logprobs)
        except BaseException:
            self._drop_all()
            raise

    def _postprocess(self, step: Step, tokens: np.ndarray, logprobs: np.ndarray) -> list[RequestOutput]:
        slots, sampled = self._slots, step.sampled
        if not np.isfinite(logprobs).all():
            raise RuntimeError("the model's logits hold NaN or infinity; the weights are broken")
        self._scheduler.advance(sampled, tokens, logprobs)
        self._record_versions([slot for chunk in step.chunks for slot in chunk.samples])
        stopped = np.isin(tokens, self.eos_token_ids) & ~slots.ignore_eos[sampled]
        for i in np.flatnonzero(slots.has_stops[sampled]):
            sequence = slots.sequences[sampled[i]]
            assert sequence is not None, "an empty slot was sampled"
            stopped[i] |= int(tokens[i]) in sequence.request.params.stop_token_ids
        done = stopped | (slots.num_tokens[sampled] >= slots.max_len[sampled])
        finished: list[RequestOutput] = []
        if done.any():
            reasons: list[FinishReason] = ["stop" if s else "length" for s in stopped[done]]
            sequences = self._scheduler.finish(sampled[done].tolist())
            finished = self._complete(list(zip(sequences, reasons, strict=True)))
        self.stats.steps += 1
        self.stats.sampled_tokens += len(sampled)
        self._count()
        return finished

    def _record_versions(self, fresh: list[int]) -> None:
        """Notes the present version for slots that have just drawn their first token since they were admitted."""
        for slot in fresh:
            sequence = self._slots.sequences[slot]
            assert sequence is not None, "an empty slot was sampled"
            generated = int(self._slots.num_tokens[slot] - self._slots.prompt_len[slot])
            if not sequence.versions or sequence.versions[-1][1] != self.version:
                sequence.versions.append((generated - 1, self.version))

    def _complete(self, sequences: list[tuple[Sequence, FinishReason]]) -> list[RequestOutput]:
        """Stores finished sequences in their requests; returns the requests that are complete with them."""
        complete = []
        for sequence, reason in sequences:
            request = sequence.request
            ids = sequence.token_ids[len(request.prompt) :].tolist()
            for offset in range(len(sequence.keys)):  # more than one only when aborted before the fork
                request.outputs[sequence.index + offset] = Completion(
                    index=sequence.index + offset,
                    token_ids=ids,
                    logprobs=sequence.logprobs[0].tolist(),
                    model_logprobs=sequence.logprobs[1].tolist(),
                    finish_reason=reason,
                    weight_versions=sequence.weight_versions(),
                    text=self._decode(ids) if self._decode is not None else "",
                )
            if request.finished:
                del self._requests[request.request_id]
                complete.append(request.to_output())
        return complete

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request now; returns it with the tokens so far, or None when no such request runs."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        sequences = self._scheduler.abort(request)
        (output,) = self._complete([(sequence, "abort") for sequence in sequences])
        self._count()
        return output

    def _drop_all(self) -> None:
        for request in list(self._requests.values()):
            self._scheduler.abort(request)
        self._requests.clear()
        # Blocks are findable from when they are scheduled; those of the failed step were not computed.
        self._scheduler.reset_prefix_cache()
        self._count()

    def update_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes new weights, in place, between two steps.

        Names, shapes, dtypes and count must be the model's exactly (ValueError otherwise, nothing changed). The
        prefix cache is dropped. Running requests continue: their next tokens come from the new weights on keys and
        values of the old ones, and `weight_versions` says which token came from which; a caller that does not want
        this steps until `has_unfinished` is false first. Preempted requests are computed again with the new weights.
        """
        if version <= self.version:
            raise ValueError(f"update_weights: version is {version}, the engine holds {self.version}; it must grow.")
        self._weights.update(tensors)
        self.version = version
        self.reset_prefix_cache()
        for slot in self._scheduler.running:
            sequence = self._slots.sequences[slot]
            generated = int(self._slots.num_tokens[slot] - self._slots.prompt_len[slot])
            if sequence is not None and generated > 0 and sequence.versions:
                sequence.versions.append((generated, version))

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; running requests keep their own blocks."""
        self._scheduler.reset_prefix_cache()
        self._count()

    def check(self) -> None:
        """Asserts that no block leaked or is used twice."""
        self._pool.check([self._slots.blocks(slot).tolist() for slot in self._scheduler.running])

    def _count(self) -> None:
        self.stats.num_free_blocks = self._pool.num_free
        self.stats.num_running = len(self._scheduler.running)
        self.stats.num_waiting = len(self._scheduler.waiting)


def _default_num_blocks(layers: list[LayerSpec], device: torch.device, config: EngineConfig, max_model_len: int) -> int:
    """Blocks that all slots can use at full length, within the share of memory the cache may take."""
    per_position = sum(2 * s.kv_heads * s.head_size * s.dtype.itemsize for s in layers)
    if device.type == "cpu":
        budget_bytes = _CPU_CACHE_BYTES
    else:
        free_bytes, total_bytes = torch.accelerator.get_memory_info(device)
        budget_bytes = int(min(_MEMORY_SHARE * total_bytes, 0.9 * free_bytes))
    usable = config.max_num_seqs * -(-max_model_len // config.block_size)
    fitting = budget_bytes // (per_position * config.block_size)
    if fitting < 1:
        raise ValueError(
            f"one block of the cache takes {per_position * config.block_size} bytes but {budget_bytes} are free on "
            f"{device}; use a smaller model or set num_blocks."
        )
    return int(min(usable, fitting))
