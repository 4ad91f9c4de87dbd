"""What the simulated device costs over the CPU in a GRPO step: generation and update, operator log on.

    python tests/bench/grpo_overhead.py [--model S|M] [--tokens N] [--pairs N]

One process, one thread; cpu and neuron alternate on the same prompts (16 x 8 completions of N tokens) and weights.
`ratio_rollout` and `ratio_update` are medians of the paired CPU-time ratios. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from models import llama

from rlneuron.device import oplog, select
from rlneuron.rollout import LLM, RequestOutput, SamplingParams
from rlneuron.trainer import Learner, LearnerConfig, TrainBatch

NUM_PROMPTS, GROUP = 16, 8
PROMPTS = [[100 + index * 7 + offset for offset in range(20 + index)] for index in range(NUM_PROMPTS)]


def generation(name: str, device: torch.device, num_tokens: int) -> Callable[[], list[RequestOutput]]:
    """A function that generates for all prompts, the same each time."""
    llm = LLM(llama(name), None, device=device, eos_token_ids=[2])
    params = SamplingParams(n=GROUP, max_tokens=num_tokens, seed=1, ignore_eos=True)

    def generate() -> list[RequestOutput]:
        llm.engine.reset_prefix_cache()
        return llm.generate(PROMPTS, params)

    return generate


def training(name: str, device: torch.device, outputs: list[RequestOutput]) -> Callable[[], float]:
    """A function that does one optimizer step on `outputs` and returns its gradient norm."""
    completions = [completion for output in outputs for completion in output.outputs]
    config = LearnerConfig(per_device_train_batch_size=len(completions), learning_rate=1e-5, max_steps=10**6)
    learner = Learner(llama(name), config, device)
    batch = TrainBatch(
        prompt_ids=[list(output.prompt_token_ids) for output in outputs for _ in output.outputs],
        completion_ids=[completion.token_ids for completion in completions],
        advantages=torch.linspace(-1.0, 1.0, len(completions)),
        truncated=[False] * len(completions),
        sampling_logprobs=[completion.logprobs for completion in completions],
    )
    return lambda: learner.update(batch)[0]["grad_norm"]


def paired_ratio(on: dict[str, Callable[[], object]], pairs: int) -> dict[str, float]:
    """Median over pairs of neuron over cpu, the order changing from pair to pair."""
    seconds: dict[str, list[float]] = {device: [] for device in on}
    for pair in range(pairs):
        for device in sorted(on, reverse=pair % 2 == 1):
            start = time.process_time()
            on[device]()
            seconds[device].append(time.process_time() - start)
    ratios = [ours / cpu for ours, cpu in zip(seconds["neuron"], seconds["cpu"], strict=True)]
    return {"ratio": statistics.median(ratios), **{f"{device}_ms": 1e3 * min(took) for device, took in seconds.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="S", choices=["S", "M"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    devices = {"cpu": torch.device("cpu"), "neuron": select.choose("neuron", simulate=True).device}
    oplog.enable()
    rollouts = {key: generation(arguments.model, device, arguments.tokens) for key, device in devices.items()}
    outputs = {key: generate() for key, generate in rollouts.items()}  # warms up, too
    tokens = {key: [c.token_ids for output in made for c in output.outputs] for key, made in outputs.items()}
    updates = {key: training(arguments.model, device, outputs["cpu"]) for key, device in devices.items()}
    norms = {key: update() for key, update in updates.items()}
    print(f"equal tokens: {tokens['cpu'] == tokens['neuron']}; gradient norms: {norms}")
    result = {}
    for what, on in (("rollout", rollouts), ("update", updates)):
        figures = paired_ratio(dict(on), arguments.pairs)
        print(what, {key: round(value, 3) for key, value in figures.items()})
        result[f"ratio_{what}"] = round(figures["ratio"], 4)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
