"""Loads a causal language model and its tokenizer from a folder or the Hugging Face hub, and refuses what cannot run.

The module is transformers' own, unmodified, on the CPU; the rollout and trainer rooms put it on their device. Code
that comes with a model is not run unless `model.trust_remote_code` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from rlneuron.fused.linear import use_host_linear

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What `model.dtype` may be."""

# A layer of any other type (linear_attention, mamba, ...) carries a recurrent state, which paged attention has not.
_ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model as both rooms get it.

    Example: `load("folder", dtype=None)` of a Qwen2.5 chat model has eos_token_ids (151645, 151643).
    """

    module: nn.Module
    """A transformers causal language model, on the CPU, in eval mode, weights of the demanded type."""
    tokenizer: PreTrainedTokenizerBase
    """Pads on the left; its pad token is the EOS token where it had none."""
    eos_token_ids: tuple[int, ...]
    """Every id that ends a completion: of generation_config, config and tokenizer, in this order, without repeats."""
    description: str
    """One line: class, parameters, dtype, vocabulary, where from."""


def load(path: str, *, dtype: torch.dtype | None, trust_remote_code: bool = False) -> LoadedModel:
    """Loads the model at `path`, a local folder or a hub id; `dtype` None keeps the type of the checkpoint.

    ValueError, one sentence: no such folder, hub id not available, no causal language model, a network that does not
    use transformers' attention interface, a tokenizer larger than the embedding, code of its own without permission.
    """
    source = _resolve(path)
    config = _from_pretrained(AutoConfig, source, path, trust_remote_code)
    refusal = attention_refusal(config)
    if refusal is not None:
        raise ValueError(f"model.path: {path!r} {refusal}")
    tokenizer = _from_pretrained(AutoTokenizer, source, path, trust_remote_code)
    module = _from_pretrained(
        AutoModelForCausalLM, source, path, trust_remote_code, config=config, dtype="auto" if dtype is None else dtype
    )
    module.eval()
    use_host_linear(module)
    _check_vocabulary(path, module, tokenizer)
    tokenizer.padding_side = "left"
    eos_token_ids = merge_eos_token_ids(module, tokenizer)
    # Padding is masked everywhere, so that any id serves; TRL, too, takes EOS where a tokenizer has no pad token.
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return LoadedModel(
        module=module,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        description=f"{type(module).__name__}, {count_parameters(module):,} parameters, "
        f"{str(next(module.parameters()).dtype).removeprefix('torch.')}, {len(tokenizer):,} tokens, from {source}",
    )


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer alone, padding on the left. ValueError as in `load`."""
    tokenizer: PreTrainedTokenizerBase = _from_pretrained(AutoTokenizer, _resolve(path), path, trust_remote_code)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def count_parameters(module: nn.Module) -> int:
    """Number of parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def merge_eos_token_ids(module: nn.Module, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a completion (empty if the model has none).

    Chat models often have several (end of turn, end of text) and name only one of them in the tokenizer; a run that
    knows only that one sees most completions as truncated.
    """
    sources = (
        getattr(getattr(module, "generation_config", None), "eos_token_id", None),
        getattr(module.config, "eos_token_id", None),
        tokenizer.eos_token_id,
    )
    ids: list[int] = []
    for value in sources:
        if isinstance(value, Iterable):
            ids.extend(int(item) for item in value)
        elif value is not None:
            ids.append(int(value))
    # A config without a tokenizer of its own may name an id that the network cannot produce (-1, or one of a parent).
    vocabulary = _num_embeddings(module)
    return tuple(dict.fromkeys(token for token in ids if 0 <= token < vocabulary))


def attention_refusal(config: PreTrainedConfig) -> str | None:
    """Why the network of this config cannot run here, as the rest of a sentence about it; None if it can.

    Engine and learner replace the attention function of the unmodified module through transformers'
    AttentionInterface: what does not call it would silently run its own attention over packed rows.
    """
    if config.is_encoder_decoder:
        return f"is an encoder-decoder model ({config.model_type}); use a decoder-only (causal) language model"
    text_config = config.get_text_config()
    recurrent = sorted(set(getattr(text_config, "layer_types", None) or ()) - _ATTENTION_LAYER_TYPES)
    if recurrent:
        return f"has layers of type {', '.join(recurrent)}; only attention layers are supported, use another model"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
            return None  # code of its own, allowed by the user: the rooms compare it with its own forward
        return f"is of type {config.model_type}, which has no causal language model in transformers; use one that has"
    network: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    network = network[0] if isinstance(network, tuple) else network
    if not (network._can_set_attn_implementation() and network._supports_attention_backend):
        return (
            f"is a {network.__name__}, which does not use transformers' attention interface, so neither engine nor "
            "learner can run it; use a model that does, such as Llama, Qwen3 or GPT-2"
        )
    return None


# ---- loading ------------------------------------------------------------------------------------------------------
def _resolve(path: str) -> str:
    """The folder or hub id to give to transformers. ValueError if it looks like a folder and is none."""
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"model.path: the folder {path!r} has no config.json; give a folder written by save_pretrained"
            )
        return str(folder)
    if path and folder.exists():
        raise ValueError(f"model.path: {path!r} is a file; give the folder that holds config.json and the weights")
    # Hub ids are owner/name, or just a name (gpt2).
    if not path or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ValueError(
            f"model.path: there is no folder {path!r}; write an existing folder, a hub id such as "
            "HuggingFaceTB/SmolLM2-135M-Instruct, or rlneuron/quickstart"
        )
    return path


def _from_pretrained(loader: Any, source: str, path: str, trust_remote_code: bool, **arguments: Any) -> Any:
    """`loader.from_pretrained`, its failures turned into one sentence."""
    try:
        with no_progress_bars():
            return loader.from_pretrained(source, trust_remote_code=trust_remote_code, **arguments)
    except (OSError, ValueError, ImportError) as error:
        text = " ".join(str(error).split())
        if "trust_remote_code" in text and not trust_remote_code:
            raise ValueError(
                f"model.path: {path!r} comes with Python code of its own, which was not run; read it, and to allow it "
                "write model.trust_remote_code: true"
            ) from error
        if Path(source).is_dir():
            raise ValueError(f"model.path: {path!r} could not be loaded by {loader.__name__}: {text[:300]}") from error
        raise ValueError(
            f"model.path: {path!r} is no local folder and could not be had from the Hugging Face hub "
            f"(offline, or no such model); write an existing folder, or a hub id that can be reached: {text[:160]}"
        ) from error


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Silences transformers' bars: every actor would write its own into the driver's output."""
    was_enabled = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers.utils.logging.enable_progress_bar()


def _num_embeddings(module: nn.Module) -> int:
    assert isinstance(module, transformers.PreTrainedModel), "from AutoModelForCausalLM"
    weight = module.get_input_embeddings().weight  # [V, D]
    assert isinstance(weight, torch.Tensor), "an embedding has a weight"
    return int(weight.shape[0])


def _check_vocabulary(path: str, module: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = _num_embeddings(module)
    if len(tokenizer) > rows:
        raise ValueError(
            f"model.path: the tokenizer in {path!r} has {len(tokenizer)} tokens but the model has {rows} embedding "
            "rows; use the tokenizer that the model was trained with, or resize the embedding and save the model again"
        )
