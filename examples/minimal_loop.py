"""GRPO from end to end in one process, without Ray: the same public pieces that a run puts into actors.

    python examples/minimal_loop.py                      # the simulated neuron device, 60 steps
    python examples/minimal_loop.py --device cpu --steps 20

A 0.25M-parameter model learns to spell words backwards. One step: next prompts -> rollouts -> rewards -> advantages ->
update -> weight sync. The engine has weights of its own, as a rollout worker on another core would.
"""

from __future__ import annotations

import argparse
import time

import torch

from rlneuron import models, quickstart
from rlneuron.builtin_rewards import reasoning_gym_exact
from rlneuron.data import PromptStream, reasoning_gym_rows, split_by_hash
from rlneuron.device import select
from rlneuron.prompts import PromptRow, render
from rlneuron.rollout import LLM, RequestOutput, SamplingParams
from rlneuron.trainer import Learner, LearnerConfig, TrainBatch, advantages

PROMPTS, SAMPLES, MAX_TOKENS = 16, 8, 7


def score(rows: list[PromptRow], outputs: list[RequestOutput]) -> torch.Tensor:
    """[B, 1] rewards: 1 if the whole answer is right, else 0."""
    pairs = [(row, completion) for row, output in zip(rows, outputs, strict=True) for completion in output.outputs]
    rewards = reasoning_gym_exact(
        completions=[completion.text for _, completion in pairs],
        **{name: [row.columns[name] for row, _ in pairs] for name in rows[0].columns},
    )
    return torch.tensor(rewards)[:, None]


def evaluate(llm: LLM, rows: list[PromptRow], temperature: float) -> float:
    """Mean reward of one completion per held-out prompt."""
    prompts = [render(llm.tokenizer, row) for row in rows]
    outputs = llm.generate(prompts, SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=1))
    return float(score(rows, outputs).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["neuron", "cpu", "cuda"], default="neuron")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    hardware = select.choose(args.device)
    print(hardware.description)
    folder = quickstart.ensure(args.seed)
    policy, engine_copy = models.load(str(folder), dtype=None), models.load(str(folder), dtype=None)
    llm = LLM(engine_copy.module, engine_copy.tokenizer, device=hardware.device, eos_token_ids=policy.eos_token_ids)
    learner = Learner(
        policy.module,
        LearnerConfig(
            learning_rate=3e-4,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=10,
            max_steps=args.steps,
            per_device_train_batch_size=PROMPTS * SAMPLES,
            max_completion_length=MAX_TOKENS,
        ),
        hardware.device,
    )
    words = reasoning_gym_rows("spell_backward", 60_000, 0, {"min_word_len": 3, "max_word_len": 6})
    split = split_by_hash(words, 256, 0)  # held out: in neither training nor the warm start
    stream = PromptStream(split.train, seed=args.seed)
    print(f"held out before: sampled {evaluate(llm, split.eval, 1.0):.3f}, greedy {evaluate(llm, split.eval, 0.0):.3f}")

    for step in range(1, args.steps + 1):
        started = time.perf_counter()
        rows = stream.next_prompts(PROMPTS)
        prompts = [render(llm.tokenizer, row) for row in rows]
        params = [SamplingParams(n=SAMPLES, max_tokens=MAX_TOKENS, seed=step * PROMPTS + i) for i in range(PROMPTS)]
        outputs = llm.generate(prompts, params)
        rewards_BR = score(rows, outputs)
        group = advantages.group_advantages(rewards_BR, torch.ones(1), num_generations=SAMPLES)
        pairs = [(output, completion) for output in outputs for completion in output.outputs]
        batch = TrainBatch(
            prompt_ids=[output.prompt_token_ids for output, _ in pairs],
            completion_ids=[completion.token_ids for _, completion in pairs],
            advantages=group.advantages_B,
            sampling_logprobs=[completion.logprobs for _, completion in pairs],
            truncated=[completion.finish_reason == "length" for _, completion in pairs],
        )
        (metrics,) = learner.update(batch)
        llm.engine.update_weights(step, learner.state_dict_for_sync())
        if step % 10 == 0 or step == args.steps:
            wall_s = time.perf_counter() - started
            print(f"step {step:3d}  reward {float(rewards_BR.mean()):.3f}  loss {metrics['loss']:+.4f}  {wall_s:.2f} s")

    print(f"held out after:  sampled {evaluate(llm, split.eval, 1.0):.3f}, greedy {evaluate(llm, split.eval, 0.0):.3f}")


if __name__ == "__main__":
    main()
