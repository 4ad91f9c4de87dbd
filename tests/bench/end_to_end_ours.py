"""Our side of end_to_end.py: the product's own run (Ray actors, engine, learner, weight sync), measured from outside.

CPU seconds are read from every process of the run before and after each step; the first step is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
from end_to_end_model import LEARNING_RATE, MAX_NEW_TOKENS, PROMPTS, SAMPLES

from rlneuron.config import load_config
from rlneuron.controller import Controller
from rlneuron.run import Run

HERE = Path(__file__).resolve().parent


class MeteredController(Controller):
    """Reads the clocks around every step."""

    def run_step(self) -> None:
        before = self._clocks()
        tokens = self.num_completion_tokens
        super().run_step()
        after = self._clocks()
        self.steps_done = getattr(self, "steps_done", 0) + 1
        if self.steps_done > 1:
            METER["tokens"] += self.num_completion_tokens - tokens
            for key in ("cpu_s", "daemons_cpu_s", "wall_s"):
                METER[key] += after[key] - before[key]

    def _clocks(self) -> dict[str, float]:
        usage = self.workers.usage()
        for name, one in usage.items():
            BY_ROLE.setdefault(name, []).append(one.cpu_s)
        return {
            "cpu_s": sum(one.cpu_s for one in usage.values()) + time.process_time(),
            "daemons_cpu_s": daemons_cpu_s({owner.pid for owner in self.workers.owners} | {os.getpid()}),
            "wall_s": time.perf_counter(),
        }


METER = {"tokens": 0.0, "cpu_s": 0.0, "daemons_cpu_s": 0.0, "wall_s": 0.0}
BY_ROLE: dict[str, list[float]] = {}


def daemons_cpu_s(own: set[int]) -> float:
    """CPU seconds of Ray's own processes: everything below this one that is not an actor of ours."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        if process.pid not in own:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
    return total


def settings(args: argparse.Namespace) -> Mapping[str, object]:
    return {
        "model": {"path": str(args.folder / "model")},
        "data": {"path": str(args.folder / "prompts.jsonl"), "shuffle_dataset": False},
        "reward": {"funcs": [f"{HERE / 'end_to_end_model.py'}:reward"]},
        "rollout": {"num_generations": SAMPLES, "max_completion_length": MAX_NEW_TOKENS, "num_workers": 2},
        "device": {"type": args.device},
        "train": {
            "output_dir": str(args.folder / f"run-{args.device}"),
            "max_steps": args.steps + 1,
            "learning_rate": LEARNING_RATE,
            "per_device_train_batch_size": PROMPTS * SAMPLES,
            "bf16": args.dtype == "bf16",
            "seed": 0,
        },
        "logging": {"report_to": "none", "logging_steps": 1},
        "ray": {"dashboard": False},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--dtype")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--device")
    args = parser.parse_args()
    config_file = args.folder / f"run-{args.device}.yaml"
    config_file.write_text(json.dumps(settings(args)))  # JSON is YAML
    run = Run(load_config([config_file]), command="bench", run_id=f"bench-{os.getpid()}", controller=MeteredController)
    if run.main() != 0:
        raise SystemExit("the run failed")
    samples = PROMPTS * SAMPLES * args.steps
    result = {
        "tokens": METER["tokens"],
        "tokens_per_cpu_s": METER["tokens"] / METER["cpu_s"],
        "tokens_per_wall_s": METER["tokens"] / METER["wall_s"],
        "samples_per_wall_s": samples / METER["wall_s"],
        "cpu_s_per_step": METER["cpu_s"] / args.steps,
        "daemons_cpu_s": METER["daemons_cpu_s"] / args.steps,
        "cpu_s_by_role": {name: round((s[-1] - s[2]) / args.steps, 2) for name, s in BY_ROLE.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
