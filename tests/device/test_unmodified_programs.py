"""Programs that know nothing of us, TRL's and transformers' trainers, on neuron by an environment variable alone."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMMON = """
import json, sys, torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.set_num_threads(1)
words = WordLevel({f"w{i}": i for i in range(61)}, unk_token="w3")
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(words), pad_token="w0", eos_token="w2", unk_token="w3")
torch.manual_seed(0)
folder, dtype = sys.argv[1:]
LlamaForCausalLM(LlamaConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.2, max_position_embeddings=64, eos_token_id=2, pad_token_id=0,
)).save_pretrained(folder)
model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
shared = dict(
    output_dir=folder, report_to="none", logging_steps=1, learning_rate=1e-2, per_device_train_batch_size=8,
    save_strategy="no", bf16=dtype == "bf16", use_cpu=not torch.accelerator.is_available())
"""

GRPO = """
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

seen = []

class Reseed(TrainerCallback):
    # The data loader draws from the CPU's generator, sampling from the device's: the same state for both devices.
    def on_step_begin(self, args, state, control, **_):
        torch.manual_seed(state.global_step)

def reward(completion_ids, **_):
    seen.extend(completion_ids)
    return [float(sum(i % 2 for i in ids)) for ids in completion_ids]

trainer = GRPOTrainer(
    model=model, processing_class=tokenizer, reward_funcs=reward, callbacks=[Reseed()],
    train_dataset=Dataset.from_list([{"prompt": f"w{5 + i} w6 w{20 + i}"} for i in range(8)]),
    args=GRPOConfig(max_steps=2, num_generations=4, max_completion_length=8, beta=0.04, **shared),
)
trainer.train()
"""

SFT = """
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

seen = None
rows = [{"input_ids": [5 + i, 6, 20 + i, 7 + i, 2]} for i in range(32)]
trainer = Trainer(
    model=model, train_dataset=Dataset.from_list(rows),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    args=TrainingArguments(max_steps=4, **shared),
)
trainer.train()
"""

REPORT = """
history = [{key: entry[key] for key in ("loss", "grad_norm")} for entry in trainer.state.log_history if "loss" in entry]
print(json.dumps({
    "device": str(next(trainer.model.parameters()).device), "accelerator": str(torch.accelerator.current_accelerator()),
    "history": history, "seen": seen, "last": trainer.state.log_history[-1]["train_loss"],
    "weights": sum(p.double().abs().sum().item() for p in trainer.model.cpu().parameters())}))
"""


def run(program: str, folder: Path, dtype: str, **environment: str) -> dict[str, Any]:
    """Runs the program in a process of its own, offline; returns what it reports."""
    folder.mkdir(exist_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    command = [sys.executable, "-c", COMMON + program + REPORT, str(folder / "out"), dtype]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "num_steps", "dtype"),
    [(GRPO, 2, "fp32"), (SFT, 4, "fp32"), (SFT, 4, "bf16")],
    ids=["GRPOTrainer", "Trainer", "Trainer-bf16"],
)
def test_trainers_run_unmodified_and_equal_the_cpu(program: str, num_steps: int, dtype: str, tmp_path: Path) -> None:
    cpu = run(program, tmp_path / "cpu", dtype, RLNEURON_SIM="")
    ours = run(program, tmp_path / "neuron", dtype, RLNEURON_SIM="trn2.3xlarge")
    assert (cpu["device"], cpu["accelerator"]) == ("cpu", "None")
    assert (ours["device"], ours["accelerator"]) == ("neuron:0", "neuron")
    assert ours["seen"] == cpu["seen"], "the same completions are sampled"
    assert len(ours["history"]) == num_steps and all(step["grad_norm"] > 0 for step in ours["history"])
    for step, expected in zip(ours["history"], cpu["history"], strict=True):
        # A norm over many tensors is one kernel here, and several there.
        assert step == pytest.approx(expected, rel=1e-6)
    assert ours["weights"] == pytest.approx(cpu["weights"], rel=1e-6)


@pytest.mark.slow
def test_grpo_trainer_runs_in_bf16(tmp_path: Path) -> None:
    """Its default. The CPU's autocast keeps other operators in float32 than accelerators' does: nothing to compare."""
    ours = run(GRPO, tmp_path, "bf16", RLNEURON_SIM="trn2.3xlarge")
    assert ours["device"] == "neuron:0" and len(ours["seen"]) == 16
    assert all(math.isfinite(step["loss"]) and 0 < step["grad_norm"] < 100 for step in ours["history"])
