"""The unmodified Hugging Face module on packed rows: hidden states and log-probabilities of scored tokens.

The module's attention is routed, through transformers' attention interface, to `rlneuron::varlen_attention`; the
packed segments travel as a forward keyword. A model that ignores the interface, or does something to the logits after
its output head, is found out by comparing with its own forward once, and refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from rlneuron.device.ops.token_logprobs import token_logprobs
from rlneuron.device.ops.varlen_attention import varlen_attention
from rlneuron.trainer.batch import PackedRows, pack

ATTENTION = "rlneuron_packed"


def _packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, K, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_segments: Tensor | None = None,
    longest_row: int = 0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_of_other_implementations: Any,
) -> tuple[Tensor, None]:
    assert packed_segments is not None, "the packed attention was called outside PackedModel"
    if sliding_window is not None and longest_row > sliding_window:
        raise ValueError(
            f"a row of {longest_row} tokens exceeds this model's sliding window of {sliding_window}; the learner "
            "supports full attention only, so shorten max_completion_length or the prompts."
        )
    assert dropout == 0.0 and softcap is None and s_aux is None and position_bias is None, "refused by PackedModel"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    return varlen_attention(q, k, v, packed_segments, scale)[None], None


AttentionInterface.register(ATTENTION, _packed_attention)


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout of `model` to 0, those that attention modules keep as a number included."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def _dropouts(model: nn.Module) -> list[str]:
    found = []
    for name, module in model.named_modules():
        rate = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        if isinstance(rate, float) and rate > 0:
            found.append(f"{name} ({rate})")
    return found


class PackedModel:
    """Runs `model` on packed rows. The model's parameters are used in place; nothing is copied."""

    def __init__(self, model: Any, *, temperature: float, bf16: bool = False, device: torch.device) -> None:
        dropouts = _dropouts(model)
        if dropouts:
            raise ValueError(
                f"the model has dropout, e.g. {dropouts[0]}, which makes the policy that is trained differ from the "
                "one that sampled; write disable_dropout: true."
            )
        self.model = model
        self.device = device
        self.temperature = temperature
        self.bf16 = bf16
        self.head: nn.Linear = model.get_output_embeddings()
        self.body: nn.Module = model.base_model
        if not isinstance(self.head, nn.Linear):
            raise ValueError(f"{type(model).__name__} has no linear output head, which the learner needs.")
        self._compare_with_own_forward()

    @contextlib.contextmanager
    def attention(self) -> Iterator[None]:
        """Within, the model attends by packed segments. It must span the backward too (gradient checkpointing)."""
        config = self.model.config
        before = config._attn_implementation
        config._attn_implementation = ATTENTION
        try:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                yield
        finally:
            config._attn_implementation = before

    def hidden_states(self, rows: PackedRows) -> Tensor:
        """Final hidden states at the positions that predict the scored tokens [N, H]."""
        output = self.body(
            input_ids=rows.input_ids,
            position_ids=rows.position_ids,
            use_cache=False,
            packed_segments=rows.segments,
            longest_row=rows.longest_row,
        )
        hidden = output.last_hidden_state[0]
        return hidden.index_select(0, rows.sources)

    def logprobs(self, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each scored token, two float32 [N], at this temperature."""
        dtype = torch.bfloat16 if self.bf16 else self.head.weight.dtype
        bias = None if self.head.bias is None else self.head.bias.to(dtype)
        hidden, weight = self.hidden_states(rows).to(dtype), self.head.weight.to(dtype)
        return token_logprobs(hidden, weight, bias, rows.targets, temperature=self.temperature)

    @torch.no_grad()
    def _compare_with_own_forward(self) -> None:
        """Refuses a model whose packed log-probabilities are not those of its own forward, on two tiny rows."""
        vocab = self.head.weight.shape[0]
        # Ids from the middle: the first ones are often unused tokens, on which bfloat16 is off by 2 nats and more.
        token = [(vocab // 2 + offset) % vocab for offset in range(7)]
        prompt, completions = [token[1], token[3], token[2]], [[token[5], token[4]], [token[3], token[6]]]
        packed = pack([prompt, prompt], completions, [0, 1], device=self.device, share_prompts=True)
        training, bf16 = self.model.training, self.bf16
        self.model.eval()
        # Without autocast, whose rounding would hide real differences.
        self.bf16 = False
        try:
            with self.attention():
                ours, _ = self.logprobs(packed)
            theirs = []
            for completion in completions:
                ids = torch.tensor([prompt + completion], device=self.device)
                logits = self.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
                log_p = torch.log_softmax(logits / self.temperature, -1)
                theirs.append(log_p.gather(1, ids[0, len(prompt) :, None])[:, 0])
        except AssertionError as error:
            raise ValueError(f"{type(self.model).__name__} cannot be trained packed: {error}.") from error
        finally:
            self.model.train(training)
            self.bf16 = bf16
        difference = (ours - torch.cat(theirs)).abs().max().item()
        exact = self.model.dtype == torch.float32
        if not difference <= (1e-3 if exact else 0.3):
            raise ValueError(
                f"{type(self.model).__name__} gives other log-probabilities packed than alone (they differ by "
                f"{difference:.3g}): it does not use transformers' attention interface, or changes the logits after "
                "its output head; the learner does not support that."
            )
