"""The loop of a run.

    prompts --next_prompts--> RolloutActor.generate --> RewardActor.score --> advantages
       ^                                                                          |
       |            RolloutActor.load_weights <-- shared memory <-- LearnerActor.update (ReferenceActor.logprobs)

One generation batch feeds `optimizer_steps_per_generation` optimizer steps (1 by default). A step is an optimizer
step everywhere: in `train.max_steps`, in `metrics.jsonl`, in checkpoint names. The loop does no mathematics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlneuron import experience
from rlneuron.batch_arithmetic import BatchArithmetic
from rlneuron.config import RunConfig
from rlneuron.console import ProgressView
from rlneuron.interrupt import Interrupt
from rlneuron.metrics import MetricsLog, completion_metrics, write_completions
from rlneuron.prompts import PromptRow
from rlneuron.rewards import RewardBatch, RewardMatrix
from rlneuron.rollout import RequestOutput
from rlneuron.run_data import Prompts
from rlneuron.stopwatch import Stopwatch
from rlneuron.trainer import advantages, checkpoint
from rlneuron.workers import Workers

ENGINE_COUNTERS = ("prefill_tokens", "decode_tokens", "prefix_hit_tokens", "preemptions")


@dataclass(frozen=True, slots=True)
class Generated:
    """One generation batch, scored."""

    rows: list[PromptRow]
    """[B] the prompt row of each completion."""
    outputs: list[RequestOutput]
    """[P] one per prompt, G completions each."""
    rewards: RewardMatrix
    """[B, R]"""


class Controller:
    """Runs `max_steps` optimizer steps with the given workers."""

    def __init__(
        self,
        config: RunConfig,
        arithmetic: BatchArithmetic,
        *,
        workers: Workers,
        prompts: Prompts,
        output_dir: Path,
        log: MetricsLog,
        view: ProgressView,
        interrupt: Interrupt,
    ) -> None:
        self.config = config
        self.arithmetic = arithmetic
        self.workers = workers
        self.prompts = prompts
        self.stream = prompts.stream
        self.output_dir = output_dir
        self.log = log
        self.view = view
        self.interrupt = interrupt
        self.step = 0
        self.num_tokens = 0.0
        """Prompt and completion tokens trained so far (TRL's `num_tokens`)."""
        self.num_completion_tokens = 0
        self.saved_at: int | None = None
        self._usage: dict[str, float] = {}
        self._data_state = self.stream.state_dict()
        """Where the data stood after the last whole step; an interrupted step's prompts are served again."""
        self.evaluations: list[dict[str, float]] = []

    # ---- the run ----
    def run(self) -> None:
        """From the current step to `train.max_steps`; evaluates and saves on the way and at the end."""
        if self.step > 0:  # at step 0 every worker has loaded the same model; after a resume only the learner has
            self.workers.sync_weights(self.step)
        if self.step == 0 and self.config.train.eval_on_start and self.prompts.eval_rows:
            self._log(0, self.evaluate())
        while self.step < self.arithmetic.max_steps:
            self.run_step()
        if self.saved_at != self.step:
            self.save()

    def run_step(self) -> None:
        """One generation batch: prompts, rollouts, rewards, advantages, update, weight sync, records."""
        clock = Stopwatch()
        rows = self.stream.next_prompts(self.arithmetic.prompts_per_generation)
        outputs = clock.time("generate", lambda: self.generate(rows, kind="train"))
        generated = clock.time("reward", lambda: self.score(rows, outputs))
        group = self.compute_advantages(generated)
        batch = experience.to_train_batch(outputs, group.advantages_B)
        if self.config.algo.beta > 0:
            batch.ref_logprobs = clock.time("reference", lambda: self.workers.reference_logprobs(batch))
        with self.interrupt.protected():  # learner, engines and records move to the next step together
            updates = clock.time("update", lambda: self.workers.update(batch))
            self.step += len(updates)
            clock.time("sync", lambda: self.workers.sync_weights(self.step))
            self._record(generated, group, updates, clock)
            self._data_state = self.stream.state_dict()
        if self._due(self.config.train.save_steps, len(updates)):
            self.save()

    # ---- phases ----
    def generate(self, rows: Sequence[PromptRow], *, kind: str) -> list[RequestOutput]:
        """[P] rollouts of `rows`; `kind` is "train", "eval" or "greedy" (see experience.sampling_params)."""
        prompt_ids = [self.prompts.token_ids(row) for row in rows]
        params = experience.sampling_params(self.config, kind=kind, step=self.step, count=len(rows))
        return self.workers.generate(prompt_ids, params)

    def score(self, rows: Sequence[PromptRow], outputs: Sequence[RequestOutput]) -> Generated:
        repeated = experience.repeat_rows(rows, outputs)
        batch = RewardBatch.from_completions(
            repeated,
            [completion.text for output in outputs for completion in output.outputs],
            [completion.token_ids for output in outputs for completion in output.outputs],
            group_size=len(outputs[0].outputs),
            step=self.step,
        )
        return Generated(repeated, list(outputs), self.workers.score(batch))

    def evaluate(self) -> dict[str, float]:
        """Held-out reward: `eval_reward` sampled as in training, one sample a prompt; `eval_reward_greedy` at T = 0."""
        clock = Stopwatch()
        result: dict[str, float] = {}
        for kind, name in (("eval", "eval_reward"), ("greedy", "eval_reward_greedy")):
            outputs = clock.time("eval", lambda kind=kind: self.generate(self.prompts.eval_rows, kind=kind))  # type: ignore[misc]
            totals = self._totals(self.score(self.prompts.eval_rows, outputs).rewards)
            scored = totals[~totals.isnan()]
            result[name] = float(scored.mean()) if len(scored) else math.nan
        self.evaluations.append({"step": float(self.step), **result})
        return {**result, "wall_eval_s": clock.seconds["eval"]}

    def save(self) -> Path:
        """`checkpoint-<step>`: weights, optimizer, schedule, RNG, and where the data stands."""
        state = {"data": self._data_state, "num_tokens": self.num_tokens, "evaluations": self.evaluations}
        folder = self.workers.save(self.output_dir, state)
        self.saved_at = self.step
        return folder

    def resume(self, folder: Path) -> None:
        """Continues from `folder`: the same data order, optimizer, schedule, RNG and step."""
        state = self.workers.load(folder)
        self.stream.load_state_dict(state["data"])
        self._data_state = self.stream.state_dict()
        self.num_tokens = float(state["num_tokens"])
        self.evaluations = list(state["evaluations"])
        self.step = checkpoint.step_of(folder)
        self.saved_at = self.step

    # ---- small parts ----
    def _totals(self, rewards: RewardMatrix) -> torch.Tensor:
        return advantages.total_rewards(rewards.values, rewards.weights)

    def compute_advantages(self, generated: Generated) -> advantages.Advantages:
        algo = self.config.algo
        return advantages.group_advantages(
            generated.rewards.values,
            generated.rewards.weights,
            num_generations=self.config.rollout.num_generations,
            scale_rewards=algo.scale_rewards,
        )

    def _due(self, every: int | None, new_steps: int) -> bool:
        """Whether a multiple of `every` lies among the last `new_steps` steps."""
        return bool(every) and self.step // every > (self.step - new_steps) // every  # type: ignore[operator]

    def _record(
        self,
        generated: Generated,
        group: advantages.Advantages,
        updates: Sequence[dict[str, float]],
        clock: Stopwatch,
    ) -> None:
        """One line per optimizer step; the generation batch's numbers go to its last step."""
        completions = [c for output in generated.outputs for c in output.outputs]
        metrics = {
            **completion_metrics(
                [len(c.token_ids) for c in completions],
                [c.finish_reason == "length" for c in completions],
                num_prompt_tokens=sum(len(o.prompt_token_ids) * len(o.outputs) for o in generated.outputs),
            ),
            **generated.rewards.metrics(),
            **advantages.reward_metrics(generated.rewards.values, generated.rewards.names, group),
            **{f"wall_{phase}_s": seconds for phase, seconds in clock.seconds.items()},
            **self._usage_metrics(),
            "wall_step_s": clock.total_s(),
        }
        self.num_tokens += metrics["num_tokens"]
        self.num_completion_tokens += sum(len(c.token_ids) for c in completions)
        metrics["num_tokens"] = self.num_tokens
        metrics["epoch"] = self.stream.epoch
        last = self.step >= self.arithmetic.max_steps
        if self.prompts.eval_rows and (last or self._due(self.config.train.eval_steps, len(updates))):
            metrics.update(self.evaluate())
        first = self.step - len(updates) + 1
        for step, update in enumerate(updates, start=first):
            self._log(step, {**update, **(metrics if step == self.step else {})}, new_steps=len(updates))
        if self.config.logging.log_completions:
            self._write_completions(generated, group.advantages_B)

    def _usage_metrics(self) -> dict[str, float]:
        """What the cores did since the last call: operator counts, FLOPs and bytes, exact; the engine's counters."""
        usage = self.workers.usage()
        now: dict[str, float] = {}
        for one in usage.values():
            for name, value in (
                ("device/operators", one.operators),
                ("device/flops", one.flops),
                ("device/bytes", one.moved_bytes),
                *((f"rollout/{name}", one.engine.get(name, 0.0)) for name in ENGINE_COUNTERS),
            ):
                now[name] = now.get(name, 0.0) + value
        change = {name: value - self._usage.get(name, 0.0) for name, value in now.items()}
        self._usage = now
        return {**change, "device/hbm_peak_gib": max(one.hbm_peak_bytes for one in usage.values()) / 2**30}

    def _log(self, step: int, metrics: dict[str, float], *, new_steps: int = 1) -> None:
        self.log.write(step, metrics)
        self.view.advance(step)
        if step == 0 or "eval_reward" in metrics or self._due(self.config.logging.logging_steps, new_steps):
            self.view.show(step, metrics)

    def _write_completions(self, generated: Generated, advantages_B: torch.Tensor) -> None:
        completions = [c for output in generated.outputs for c in output.outputs]
        table: dict[str, list[Any]] = {
            "step": [self.step] * len(completions),
            "uid": [row.uid for row in generated.rows],
            "prompt": [row.prompt for row in generated.rows],
            "completion": [c.text for c in completions],
            "completion_ids": [c.token_ids for c in completions],
            "finish_reason": [c.finish_reason for c in completions],
            "weight_version": [c.weight_versions[-1] if c.weight_versions else -1 for c in completions],
            **generated.rewards.columns(),
            "advantage": advantages_B.tolist(),
        }
        write_completions(self.output_dir, self.step, table)
