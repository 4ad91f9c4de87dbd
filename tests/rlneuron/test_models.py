"""Loading models: what comes out, and what is refused, offline and without running anybody's code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    T5Config,
)

from rlneuron import models

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 12}


def tokenizer(num_words: int = 12, *, pad: bool = False) -> PreTrainedTokenizerFast:
    words = {"<eos>": 2, "<unk>": 0, "<pad>": 1} | {f"w{i}": i for i in range(3, num_words)}
    core = Tokenizer(WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", unk_token="<unk>", **({"pad_token": "<pad>"} if pad else {})
    )


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=16, eos_token_id=2, tie_word_embeddings=True))


def saved(folder: Path, model: torch.nn.Module, words: PreTrainedTokenizerFast | None = None) -> str:
    model.save_pretrained(folder)
    (words or tokenizer()).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "model",
    [
        llama(),
        Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=8, intermediate_size=16)),
        GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=12, n_positions=16)),
    ],
    ids=["llama", "qwen3", "gpt2"],
)
def test_weights_type_padding_side_and_description(tmp_path: Path, model: torch.nn.Module) -> None:
    loaded = models.load(saved(tmp_path, model), dtype=torch.float32)
    wanted = model.state_dict()
    assert {name: tensor.dtype for name, tensor in loaded.module.state_dict().items()} == dict.fromkeys(
        wanted, torch.float32
    )
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.module.state_dict().items())
    assert not loaded.module.training
    assert loaded.tokenizer.padding_side == "left"
    assert type(model).__name__ in loaded.description and f"{models.count_parameters(model):,}" in loaded.description


def test_dtype_of_the_checkpoint_or_as_demanded(tmp_path: Path) -> None:
    path = saved(tmp_path, llama().bfloat16())
    assert next(models.load(path, dtype=None).module.parameters()).dtype == torch.bfloat16
    assert next(models.load(path, dtype=torch.float32).module.parameters()).dtype == torch.float32


def test_every_eos_of_generation_config_config_and_tokenizer_ends_a_completion(tmp_path: Path) -> None:
    # huggingface/trl#7039: with the tokenizer's EOS alone, a completion [5, 9, ...] runs on to the end.
    model = llama()
    model.generation_config = GenerationConfig(eos_token_id=[9, 2])
    model.config.eos_token_id = [2, 7]
    path = saved(tmp_path, model)
    assert models.load(path, dtype=None).eos_token_ids == (9, 2, 7)


def test_an_eos_that_the_network_cannot_produce_is_left_out(tmp_path: Path) -> None:
    model = llama()
    model.generation_config = GenerationConfig(eos_token_id=[9, 50256])
    assert models.load(saved(tmp_path, model), dtype=None).eos_token_ids == (9, 2)


def test_pad_token_is_eos_only_where_there_is_none(tmp_path: Path) -> None:
    assert models.load(saved(tmp_path / "a", llama()), dtype=None).tokenizer.pad_token == "<eos>"
    path = saved(tmp_path / "b", llama(), tokenizer(pad=True))
    assert models.load(path, dtype=None).tokenizer.pad_token == "<pad>"
    assert models.load_tokenizer(path).padding_side == "left"


def test_tied_parameters_count_once() -> None:
    model = llama()
    assert models.count_parameters(model) == sum(p.numel() for p in model.state_dict().values()) - 12 * 16


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "runs/a/checkpoint-10", ""])
def test_a_folder_that_is_not_there(path: str) -> None:
    with pytest.raises(ValueError, match="there is no folder") as caught:
        models.load(path, dtype=None)
    assert repr(path) in str(caught.value) and "hub id" in str(caught.value)


def test_a_hub_id_that_cannot_be_had() -> None:
    with pytest.raises(ValueError, match="could not be had from the Hugging Face hub") as caught:
        models.load("nobody/no-such-model", dtype=None)
    assert "'nobody/no-such-model'" in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_an_empty_folder_and_broken_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        models.load(str(tmp_path), dtype=None)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file"):
        models.load(str(tmp_path / "file"), dtype=None)
    path = saved(tmp_path / "model", llama())
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="could not be loaded by AutoModelForCausalLM"):
        models.load(path, dtype=None)


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    T5Config(d_model=16, num_layers=1, vocab_size=12).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="encoder-decoder model"):
        models.load(str(tmp_path), dtype=None)


def test_networks_without_the_attention_interface_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=12)))
    with pytest.raises(ValueError, match="BloomForCausalLM, which does not use transformers' attention interface"):
        models.load(path, dtype=None)
    assert "linear_attention" in (models.attention_refusal(MambaConfig(hidden_size=16)) or "")
    assert "linear_attention" in (models.attention_refusal(Qwen3NextConfig(hidden_size=16)) or "")
    assert models.attention_refusal(LlamaConfig(**SIZES)) is None


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 13 tokens but the model has 12 embedding rows"):
        models.load(saved(tmp_path, llama(), tokenizer(13)), dtype=None)


# ---- code that comes with a model ---------------------------------------------------------------------------------
MODEL_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).write_text("ran")
class StrangeConfig(LlamaConfig):
    model_type = "strange"
class StrangeModel(LlamaForCausalLM):
    config_class = StrangeConfig
class StrangeTokenizer(PreTrainedTokenizerFast):
    pass
"""


def _with_code(folder: Path, marker: Path, *, of_tokenizer: bool) -> str:
    """A saved model whose network (or whose tokenizer alone) is defined by a file beside it."""
    path = saved(folder, llama())
    (folder / "strange.py").write_text(MODEL_CODE.format(marker=str(marker)))
    if of_tokenizer:
        target, entries = "tokenizer_config.json", {"AutoTokenizer": [None, "strange.StrangeTokenizer"]}
        extra = {"tokenizer_class": "StrangeTokenizer"}
    else:
        target = "config.json"
        entries = {"AutoConfig": "strange.StrangeConfig", "AutoModelForCausalLM": "strange.StrangeModel"}
        extra = {"model_type": "strange"}
    settings = json.loads((folder / target).read_text())
    (folder / target).write_text(json.dumps({**settings, "auto_map": entries, **extra}))
    return path


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies a model's code into its cache before it runs it: here into a folder of the test."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.mark.usefixtures("modules")
def test_code_of_a_network_runs_only_when_allowed(tmp_path: Path) -> None:
    # vllm-project/vllm#38319: remote code ran although the user had said no.
    marker = tmp_path / "marker"
    path = _with_code(tmp_path / "model", marker, of_tokenizer=False)
    with pytest.raises(ValueError, match=r"model\.trust_remote_code: true"):
        models.load(path, dtype=None)
    assert not marker.exists()
    loaded = models.load(path, dtype=None, trust_remote_code=True)
    assert marker.exists() and type(loaded.module).__name__ == "StrangeModel"


@pytest.mark.usefixtures("modules")
def test_code_of_a_tokenizer_runs_only_when_allowed(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = _with_code(tmp_path / "model", marker, of_tokenizer=True)
    with pytest.raises(ValueError, match=r"model\.trust_remote_code: true"):
        models.load(path, dtype=None)
    with pytest.raises(ValueError, match=r"model\.trust_remote_code: true"):
        models.load_tokenizer(path)
    assert not marker.exists()
    loaded = models.load(path, dtype=None, trust_remote_code=True)
    assert marker.exists() and "StrangeTokenizer" in type(loaded.tokenizer).__name__
