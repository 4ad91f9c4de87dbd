"""TRL's side of end_to_end.py: GRPOTrainer, use_vllm=False, on the CPU."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from datasets import load_dataset
from end_to_end_model import LEARNING_RATE, MAX_NEW_TOKENS, PROMPTS, SAMPLES, reward
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Meter(TrainerCallback):
    """Tokens, CPU and wall seconds of every step after the first."""

    def __init__(self) -> None:
        self.tokens, self.cpu_s, self.wall_s, self.steps = 0, 0.0, 0.0, 0
        self.step_tokens = 0

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        self._begin = (time.process_time(), time.perf_counter())
        self.step_tokens = 0

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self.steps += 1
        if self.steps > 1:
            self.tokens += self.step_tokens
            self.cpu_s += time.process_time() - self._begin[0]
            self.wall_s += time.perf_counter() - self._begin[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--dtype")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    meter = Meter()

    def counted(completion_ids: list[list[int]], **kwargs: object) -> list[float]:
        meter.step_tokens += sum(len(ids) for ids in completion_ids)
        return reward(completion_ids)

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(args.folder / "model"),
        reward_funcs=counted,
        train_dataset=load_dataset("json", data_files=str(args.folder / "prompts.jsonl"), split="train"),
        callbacks=[meter],
        args=GRPOConfig(
            output_dir=str(args.folder / "trl"),
            per_device_train_batch_size=PROMPTS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=MAX_NEW_TOKENS,
            max_steps=args.steps + 1,
            learning_rate=LEARNING_RATE,
            temperature=1.0,
            bf16=args.dtype == "bf16",
            gradient_checkpointing=False,
            use_cpu=True,
            shuffle_dataset=False,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        ),
    )
    trainer.train()
    samples = PROMPTS * SAMPLES * args.steps
    result = {
        "tokens": meter.tokens,
        "tokens_per_cpu_s": meter.tokens / meter.cpu_s,
        "tokens_per_wall_s": meter.tokens / meter.wall_s,
        "samples_per_wall_s": samples / meter.wall_s,
        "cpu_s_per_step": meter.cpu_s / args.steps,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
