"""How an unmodified Hugging Face decoder runs on the paged cache: our entry in transformers' attention interface.

`PagedModel` learns the geometry of the layers by one forward pass of one token, refuses what the paged attention
would get wrong, and runs packed tokens. It schedules nothing and samples nothing.
Legend: T packed tokens · H query heads · G key/value heads · D head size · N blocks · C positions per block.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from rlneuron.device.ops.paged_attention import paged_attention

NAME = "rlneuron_paged"

# What attention modules hand on that does not change the result of causal attention over packed rows.
_HARMLESS = {
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "cache_position",
    "position_embeddings",
    "is_causal",
    "dropout",
    "token_type_ids",
}
# Rotary embeddings that depend on the longest row of the batch: a row's result would depend on its neighbours.
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """What one attention layer needs of the cache."""

    heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    window: int
    softcap: float


@dataclass(slots=True, eq=False)
class PagedContext:
    """Where the tokens of one forward pass go and what they see; all tensors int32 on the device."""

    key_caches: list[torch.Tensor]
    value_caches: list[torch.Tensor]
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        layer: int = module.layer_idx  # type: ignore[assignment]
        return paged_attention(
            query,
            key,
            value,
            self.key_caches[layer],
            self.value_caches[layer],
            self.slot_mapping,
            self.block_tables,
            self.query_starts,
            self.context_lens,
            scale,
            window,
            softcap,
        )


@dataclass(slots=True, eq=False)
class _Probe:
    """Stands in for the context once: records each layer. One token attends to itself, so its output is its value."""

    layers: dict[int, LayerSpec] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        layer = getattr(module, "layer_idx", None)
        unknown = sorted(name for name, given in extra.items() if given is not None and name not in _HARMLESS)
        if unknown:
            self.problems.append(f"its attention needs {', '.join(unknown)}")
        if not getattr(module, "is_causal", True):
            self.problems.append("its attention is not causal")
        if key.shape != value.shape:
            self.problems.append(f"its keys {tuple(key.shape)} and values {tuple(value.shape)} differ in shape")
        if not isinstance(layer, int) or layer in self.layers:
            self.problems.append("its attention layers are not numbered by layer_idx")
            return query.transpose(1, 2)
        self.layers[layer] = LayerSpec(
            heads=query.shape[1],
            kv_heads=key.shape[1],
            head_size=key.shape[3],
            dtype=key.dtype,
            window=window,
            softcap=softcap,
        )
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)


def _attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged_context: PagedContext | _Probe | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: query [1, H, T, D], key and value [1, G, T, D] -> ([1, T, H, D], None)."""
    if paged_context is None:
        raise ValueError(f"{type(module).__name__} does not hand keyword arguments on to its attention.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = paged_context.attend(module, query, key, value, scale, sliding_window or 0, softcap or 0.0, extra)
    return out, None


AttentionInterface.register(NAME, _attention_forward)


class PagedModel:
    """A decoder on the paged cache. The module may be shared with a learner: it is left as it was after each call."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._configs = _configs(model)
        self.layers = self._probe()
        self.vocab_size: int = self.model.get_output_embeddings().weight.shape[0]
        self.max_positions: int | None = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        context: PagedContext | _Probe,
        logits_to_keep: torch.Tensor | None,
    ) -> torch.Tensor:
        """Packed tokens [T] and positions [T] -> logits [rows, V] of the tokens `logits_to_keep` (None: all)."""
        with torch.inference_mode(), self._paged():
            out = self.model(
                input_ids=input_ids.unsqueeze(0),
                position_ids=position_ids.unsqueeze(0),
                use_cache=False,
                logits_to_keep=0 if logits_to_keep is None else logits_to_keep,
                paged_context=context,
            )
        return out.logits[0]

    @contextlib.contextmanager
    def _paged(self) -> Iterator[None]:
        before = [config._attn_implementation for config in self._configs]
        training = self.model.training
        if training:
            self.model.eval()
        for config in self._configs:
            config._attn_implementation = NAME
        try:
            yield
        finally:
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation = name
            if training:
                self.model.train()

    def _probe(self) -> list[LayerSpec]:
        name = type(self.model).__name__
        problem = _refusal(self.model)
        if problem is None:
            probe = _Probe()
            device = next(self.model.parameters()).device
            token = torch.zeros(1, dtype=torch.int32, device=device)
            try:
                self.forward(token, token, probe, None)
            except (TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"{name} cannot be generated from: a packed forward pass fails: {error}.") from error
            problem = _layer_refusal(self.model, probe)
        if problem is not None:
            raise ValueError(f"{name} cannot be generated from: {problem}.")
        return [probe.layers[i] for i in range(len(probe.layers))]


def _configs(model: nn.Module) -> list[Any]:
    """The distinct configurations that modules look their attention implementation up in."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            found[id(config)] = config
    return list(found.values())


def _refusal(model: Any) -> str | None:
    """What can be told from the module and its configuration alone."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        return "it is not a transformers causal language model (AutoModelForCausalLM)"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model; load a decoder (AutoModelForCausalLM)"
    if "logits_to_keep" not in inspect.signature(model.forward).parameters or model.get_output_embeddings() is None:
        return "its forward has no logits_to_keep, so it has no language-model head of transformers' kind"
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    if kinds & _BATCH_DEPENDENT_ROPE:
        return f"its rotary embedding ({', '.join(sorted(kinds & _BATCH_DEPENDENT_ROPE))}) depends on the whole batch"
    kinds = set(getattr(text, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of kind {', '.join(sorted(kinds))}; full_attention and sliding_attention are supported"
    if getattr(text, "attention_chunk_size", None):
        return "its attention works by chunks (attention_chunk_size)"
    if getattr(text, "use_bidirectional_attention", None):
        return "its attention is bidirectional (use_bidirectional_attention)"
    return None


def _layer_refusal(model: Any, probe: _Probe) -> str | None:
    """What the pass of one token showed."""
    text = model.config.get_text_config()
    if probe.problems:
        return probe.problems[0]
    if len(probe.layers) != text.num_hidden_layers:
        return (
            f"{len(probe.layers)} of its {text.num_hidden_layers} layers use transformers' attention interface; "
            "recurrent layers and attention of a model's own are not supported"
        )
    for i, kind in enumerate(getattr(text, "layer_types", None) or []):
        if (kind == "sliding_attention") != (probe.layers[i].window > 0):
            return f"layer {i} is declared {kind} but hands its attention the window {probe.layers[i].window}"
    return None
