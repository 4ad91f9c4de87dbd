"""The quickstart on several seeds: held-out reward at the start and the end, wall time, and the README's picture.

    python tests/bench/quickstart.py --seeds 0 1 2 --cold --picture docs/quickstart.svg

Each seed is one `python -m rlneuron.train examples/quickstart.yaml train.seed=S` in a process of its own, timed from
its start to its end: imports, Ray's start and, with --cold, the warm start are included. "End" is the mean of the
last two evaluations. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from rlneuron import quickstart

ROOT = Path(__file__).resolve().parents[2]


def run(seed: int, folder: Path, cold: bool, more: list[str]) -> dict[str, Any]:
    if cold:
        shutil.rmtree(quickstart.model_folder(seed), ignore_errors=True)
    started = time.perf_counter()
    command = [sys.executable, "-m", "rlneuron.train", "examples/quickstart.yaml", f"train.seed={seed}"]
    command += [f"train.output_dir={folder / str(seed)}", *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    rows = [json.loads(line) for line in (folder / str(seed) / "metrics.jsonl").read_text().splitlines()]
    curve = [(row["step"], row["eval_reward"], row["eval_reward_greedy"]) for row in rows if "eval_reward" in row]
    return {
        "seed": seed,
        "start": curve[0][1],
        "end": (curve[-1][1] + curve[-2][1]) / 2,
        "start_greedy": curve[0][2],
        "end_greedy": (curve[-1][2] + curve[-2][2]) / 2,
        "wall_s": time.perf_counter() - started,
        "curve": curve,
    }


def draw(results: list[dict[str, Any]], path: Path) -> None:
    plt.rcParams["svg.hashsalt"] = "quickstart"  # the same curve gives the same file
    figure, axis = plt.subplots(figsize=(6.4, 3.2))
    for result in results:
        steps, sampled, greedy = zip(*result["curve"], strict=True)
        (line,) = axis.plot(steps, sampled, marker="o", markersize=3, label=f"seed {result['seed']}, sampled")
        axis.plot(steps, greedy, linestyle="--", linewidth=1, color=line.get_color(), alpha=0.6)
    axis.plot([], [], linestyle="--", linewidth=1, color="grey", label="greedy")
    axis.set(xlabel="step", ylabel="held-out reward", ylim=(0, 1.02))
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cold", action="store_true", help="delete the warm-started model first")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("more", nargs="*", help="assignments, e.g. device.type=cpu")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            result = run(seed, Path(folder), args.cold, args.more)
            results.append(result)
            print(
                f"seed {seed}: sampled {result['start']:.3f} -> {result['end']:.3f}, "
                f"greedy {result['start_greedy']:.3f} -> {result['end_greedy']:.3f}, {result['wall_s']:.0f} s",
                flush=True,
            )
    if args.picture:
        draw(results, args.picture)
    print(
        json.dumps(
            {
                "bench": "quickstart",
                "seeds": args.seeds,
                "cold": args.cold,
                "worst_start": max(r["start"] for r in results),
                "worst_end": min(r["end"] for r in results),
                "worst_greedy_rise": min(r["end_greedy"] - r["start_greedy"] for r in results),
                "worst_wall_s": round(max(r["wall_s"] for r in results), 1),
            }
        )
    )


if __name__ == "__main__":
    main()
