"""Our learner against TRL's: CPU seconds of one optimizer step on the same tokens, one thread, alternating.

    python tests/bench/learner.py --model S --dtype fp32 --device cpu

Workload: 16 prompts x 8 completions, prompts of 32 to 128 tokens, completions of 64 to 256 (fixed by seed), TRL's
default loss, one optimizer step. TRL's side is `GRPOTrainer.compute_loss` (fused output head, sdpa, all rows padded
in micro steps of `--peer-rows`), backward, clipping and fused AdamW; ours is `Learner.update`, packing included. Both
start from the same weights, and the first step's losses and gradient norms are compared before anything is timed.
CPU time of this process (`time.process_time`). The last line is JSON: `ratio` is TRL's time over ours, the median over
the rounds, so that what else runs on the machine slows both.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from datasets import Dataset
from end_to_end_model import tokenizer
from models import SPEC, llama
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from workload import workload

from rlneuron.device import select
from rlneuron.trainer import Learner, LearnerConfig, TrainBatch, advantages

PROMPTS, SAMPLES, MAX_NEW_TOKENS, RATE = 16, 8, 256, 1e-6


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["S", "M"], default="S")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of ours; see --peer-dtype")
    parser.add_argument("--peer-dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--device", choices=["cpu", "neuron"], default="cpu", help="of ours; TRL's is the CPU")
    parser.add_argument(
        "--peer-rows", type=int, default=8, help="rows of TRL's micro steps; its default 8 is its fastest"
    )
    parser.add_argument("--tokens-per-micro-batch", type=int, default=LearnerConfig(max_steps=1).tokens_per_micro_batch)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def train_batch(vocab_size: int) -> TrainBatch:
    wanted = workload(vocab_size, PROMPTS, SAMPLES)
    generator = torch.Generator().manual_seed(1)
    completions = [torch.randint(2, vocab_size, (w.num_tokens,), generator=generator).tolist() for w in wanted]
    rewards = torch.rand(len(wanted), 1, generator=generator)
    scored = advantages.group_advantages(rewards, torch.ones(1), num_generations=SAMPLES)
    return TrainBatch(
        prompt_ids=[w.prompt for w in wanted],
        completion_ids=completions,
        advantages=scored.advantages_B,
        truncated=[False] * len(wanted),
    )


def padded(rows: list[list[int]], *, left: bool) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))

    def fill(row: list[int]) -> list[int]:
        padding = [0] * (width - len(row))
        return padding + row if left else row + padding

    return torch.tensor([fill(row) for row in rows]), torch.tensor([fill([1] * len(row)) for row in rows])


def trl_step(args: argparse.Namespace, batch: TrainBatch, folder: str) -> Callable[[], dict[str, float]]:
    """One optimizer step of TRL's trainer, micro step by micro step, as transformers' training loop does it."""
    rows = len(batch)
    settings = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=args.peer_dtype == "bf16",
        report_to="none",
        gradient_checkpointing=False,
        per_device_train_batch_size=args.peer_rows,
        gradient_accumulation_steps=rows // args.peer_rows,
        num_generations=SAMPLES,
        max_completion_length=MAX_NEW_TOKENS,
        temperature=1.0,
    )
    trainer = GRPOTrainer(
        model=llama(args.model),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "t5 t6"}] * 8),
        processing_class=tokenizer(SPEC[args.model]["vocab_size"]),
    )
    trainer.current_gradient_accumulation_steps = rows // args.peer_rows
    model: Any = trainer.model
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    num_tokens = sum(map(len, batch.completion_ids))

    def step() -> dict[str, float]:
        total = 0.0
        for start in range(0, rows, args.peer_rows):
            part = slice(start, start + args.peer_rows)
            prompt_ids, prompt_mask = padded(batch.prompt_ids[part], left=True)
            completion_ids, completion_mask = padded(batch.completion_ids[part], left=False)
            loss = trainer.compute_loss(
                model,
                {
                    "prompt_ids": prompt_ids,
                    "prompt_mask": prompt_mask,
                    "completion_ids": completion_ids,
                    "completion_mask": completion_mask,
                    "advantages": batch.advantages[part],
                    "num_items_in_batch": torch.tensor(num_tokens),
                },
            )
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": total, "grad_norm": norm.item()}

    return step


def our_step(args: argparse.Namespace, batch: TrainBatch) -> Callable[[], dict[str, float]]:
    config = LearnerConfig(
        per_device_train_batch_size=len(batch),
        max_steps=1000,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_completion_length=MAX_NEW_TOKENS,
        bf16=args.dtype == "bf16",
        tokens_per_micro_batch=args.tokens_per_micro_batch,
    )
    learner = Learner(llama(args.model), config, select.choose(args.device).device)
    return lambda: learner.update(batch)[0]


def cpu_seconds(run: Callable[[], object]) -> tuple[float, float]:
    """(CPU, wall) seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    args = arguments()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    batch = train_batch(SPEC[args.model]["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        sides = {"ours": our_step(args, batch), "trl": trl_step(args, batch, folder)}
        first = {name: step() for name, step in sides.items()}
        print({name: {key: result[key] for key in ("loss", "grad_norm")} for name, result in first.items()}, flush=True)
        if args.dtype == args.peer_dtype == "fp32":
            error = abs(first["ours"]["grad_norm"] / first["trl"]["grad_norm"] - 1)
            assert error < 1e-3, f"the two sides do not compute the same step: gradient norms differ by {error:.1e}"
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(args.rounds):
            for name in list(sides)[:: 1 if number % 2 else -1]:
                cpu_s, wall_s = cpu_seconds(sides[name])
                seconds[name].append(cpu_s)
                print(f"round {number} {name:5s} {cpu_s:7.2f} CPU s {wall_s:7.2f} wall s", flush=True)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    ratios = [theirs / ours for ours, theirs in zip(seconds["ours"], seconds["trl"], strict=True)]
    tokens = sum(map(len, batch.completion_ids))
    result = {
        "bench": "learner",
        "model": args.model,
        "dtype": args.dtype,
        "peer_dtype": args.peer_dtype,
        "device": args.device,
        "peer_rows": args.peer_rows,
        "tokens": tokens,
        "cpu_s": round(median["ours"], 2),
        "cpu_s_trl": round(median["trl"], 2),
        "tokens_per_cpu_s": round(tokens / median["ours"]),
        "load_average": round(os.getloadavg()[0], 1),
        "ratio": round(statistics.median(ratios), 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
