"""Where a run's numbers go: `metrics.jsonl` always, the terminal, TensorBoard or others by `report_to`, Ray's metrics.

Names are TRL's. Everything measured on the host's clock begins with `wall_`; there is no `sim_` key until operators
have prices.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from ray.util.metrics import Gauge

EXPORTED = (
    "reward",
    "reward_std",
    "eval_reward",
    "eval_reward_greedy",
    "loss",
    "grad_norm",
    "entropy",
    "kl",
    "frac_reward_zero_std",
    "completions/mean_length",
    "completions/clipped_ratio",
    "num_tokens",
    "wall_step_s",
    "wall_generate_s",
    "wall_update_s",
    "wall_sync_s",
)
"""The main metrics; in Prometheus `ray_rlneuron_<name>` with "/" as "_" and the run's name as a tag."""


class MetricsLog:
    """Appends one JSON object per step to `metrics.jsonl` and hands the same numbers to the other writers."""

    def __init__(self, folder: Path, *, run_name: str, report_to: Sequence[str], config: Mapping[str, Any]) -> None:
        self.path = folder / "metrics.jsonl"
        self._file = self.path.open("a")
        self._run_name = run_name
        self._gauges = {
            name: Gauge(
                f"rlneuron_{re.sub(r'[^a-z0-9_]', '_', name)}", description=f"rlneuron: {name}", tag_keys=("run",)
            )
            for name in EXPORTED
        }
        self._trackers = [_tracker(name, folder, run_name, config) for name in report_to]

    def write(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """One line for `step`; NaN and infinity are written as null, since JSON has neither."""
        row = {"step": step, **{name: _finite(value) for name, value in metrics.items()}}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, gauge in self._gauges.items():
            value = row.get(name)
            if value is not None:
                gauge.set(float(value), tags={"run": self._run_name})
        for tracker in self._trackers:
            tracker.write(step, {name: value for name, value in row.items() if value is not None})

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.close()


def drop_after(path: Path, step: int) -> None:
    """Removes the lines of steps beyond `step`: a resumed run writes them again."""
    if not path.exists():
        return
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= step]
    part = path.with_suffix(".part")
    part.write_text("".join(f"{line}\n" for line in kept))
    os.replace(part, path)


def _finite(value: float | int) -> float | int | None:
    return value if math.isfinite(value) else None


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(project="rlneuron", name=run_name, dir=str(folder), config=dict(config))

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        self._run.finish()


def _tracker(name: str, folder: Path, run_name: str, config: Mapping[str, Any]) -> _TensorBoard | _Wandb:
    if name == "tensorboard":
        return _TensorBoard(folder)
    if name == "wandb":
        return _Wandb(folder, run_name, config)
    raise ValueError(f"logging.report_to: {name!r} is unknown; allowed: tensorboard, wandb, none")


def write_completions(folder: Path, step: int, table: Mapping[str, Sequence[Any]]) -> Path:
    """`completions/completions_<step>.parquet`: one row per completion, TRL's columns plus ours. Atomic."""
    target = folder / "completions"
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"completions_{step:05d}.parquet"
    part = path.with_suffix(".part")
    pd.DataFrame(dict(table)).to_parquet(part)
    os.replace(part, path)
    return path


def completion_metrics(
    lengths: Sequence[int], truncated: Sequence[bool], *, num_prompt_tokens: int
) -> dict[str, float]:
    """TRL's `completions/*` of one generation batch.

    `lengths`: tokens of each completion, EOS included, whatever is masked in the loss; `truncated`: cut at the
    limit. `terminated` lengths are those of completions that ended by themselves; 0 when there is none, as in TRL.
    """
    finished = [n for n, cut in zip(lengths, truncated, strict=True) if not cut]
    total = len(lengths)
    return {
        "num_tokens": float(sum(lengths) + num_prompt_tokens),
        "completions/mean_length": sum(lengths) / total,
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": 1.0 - len(finished) / total,
        "completions/mean_terminated_length": sum(finished) / len(finished) if finished else 0.0,
        "completions/min_terminated_length": float(min(finished, default=0)),
        "completions/max_terminated_length": float(max(finished, default=0)),
    }
