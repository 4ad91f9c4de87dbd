"""LLM: prompts in, completions out, in vLLM's words. Tokenises, drives the engine, keeps the order of the prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rlneuron.rollout.engine import Engine, EngineConfig
from rlneuron.rollout.outputs import RequestOutput
from rlneuron.rollout.sampling_params import SamplingParams

Prompt = str | list[int] | list[dict[str, Any]]


class LLM:
    """A model with its tokenizer, ready to generate.

    Example: `LLM(model, tokenizer, device=torch.device("cpu")).generate(["1 + 1 ="], SamplingParams(n=4))`
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int = 2048,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        max_model_len: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        """Moves the module to `device` (and casts it when `dtype` is given) and makes its engine.

        `eos_token_ids`: None takes those of the model's generation config, of its config and of the tokenizer
        together. `num_blocks` or `kv_cache_tokens` set the size of the cache. For the others see EngineConfig.
        """
        if num_blocks is not None and kv_cache_tokens is not None:
            raise ValueError(f"num_blocks is {num_blocks} and kv_cache_tokens {kv_cache_tokens}; give one of them.")
        if kv_cache_tokens is not None:
            num_blocks = -(-kv_cache_tokens // block_size)
        config = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            enable_prefix_caching=enable_prefix_caching,
            max_model_len=max_model_len,
            seed=seed,
        )
        self.tokenizer = tokenizer
        self.engine = Engine(
            model if dtype is None else model.to(dtype),
            device=torch.device(device),
            config=config,
            eos_token_ids=find_eos_token_ids(model, tokenizer) if eos_token_ids is None else eos_token_ids,
            decode=None if tokenizer is None else self._decode,
        )
        self._num_requests = 0

    def _decode(self, token_ids: list[int]) -> str:
        assert self.tokenizer is not None, "decoding without a tokenizer"
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, of a conversation (through the chat template) or of ids, which stay as they are."""
        if isinstance(prompt, list) and all(isinstance(part, int) for part in prompt):
            return list(prompt)  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise ValueError(f"the prompt {str(prompt)[:40]!r} is not a list of token ids, and there is no tokenizer.")
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        if not all(isinstance(part, Mapping) for part in prompt):
            raise ValueError(f"the prompt {str(prompt)[:40]!r} must be a text, token ids or a list of messages.")
        ids = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        return list(ids)

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Completions of all prompts, in their order; `params` is one for all, or one each."""
        if isinstance(prompts, str):
            raise ValueError("prompts is a single text; give a list: generate([text], params).")
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} params were given for {len(prompts)} prompts; give one, or one each.")
        ids: list[str] = []
        try:
            for prompt, own in zip(prompts, each, strict=True):
                request_id = f"generate-{self._num_requests}"
                self._num_requests += 1
                self.engine.add_request(request_id, self.encode(prompt), own)
                ids.append(request_id)
            return self._run(ids)
        except BaseException:
            for request_id in ids:
                self.engine.abort(request_id)
            raise

    def _run(self, ids: list[str]) -> list[RequestOutput]:
        """Steps until the requests `ids` are finished; others of the engine go on beside them."""
        done: dict[str, RequestOutput] = {}
        while len(done) < len(ids):
            done |= {output.request_id: output for output in self.engine.step() if output.request_id in ids}
        return [done[request_id] for request_id in ids]


def find_eos_token_ids(model: nn.Module, tokenizer: Any | None) -> list[int]:
    """Every token id that the model or its tokenizer calls an end: a model may have several."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found |= {value} if isinstance(value, int) else set(value)
    return sorted(found)
