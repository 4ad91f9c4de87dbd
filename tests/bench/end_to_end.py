"""Whole GRPO steps, ours against TRL's GRPOTrainer, alternating in one run; one thread per process.

    python tests/bench/end_to_end.py --model S --dtype fp32 --steps 4

Both sides start from the same weights, take 16 prompts x 8 completions a step, sample at temperature 1 to their own
EOS with at most 256 new tokens, and train with TRL's default loss. Ours runs through Ray on `device.type: neuron` and
again on `cpu`. `ratio` = completion tokens trained per CPU second, ours over TRL's; ours sums learner, rollout,
reference, reward and driver processes. Ray's daemons are printed apart. Only steps after the first count: start-up,
model loading and the first step's warm-up are left out on both sides. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["S", "M"], default="S")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=4, help="counted steps per side and round")
    parser.add_argument("--rounds", type=int, default=1, help="how often the sides alternate")
    return parser.parse_args()


def side(name: str, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Runs one side in a process of its own; returns its last line."""
    script = HERE / ("end_to_end_trl.py" if name == "trl" else "end_to_end_ours.py")
    command = [sys.executable, str(script), "--model", args.model, "--dtype", args.dtype, "--steps", str(args.steps)]
    command += ["--folder", str(folder)] + ([] if name == "trl" else ["--device", name])
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{name:7s} {json.dumps(result)}  (whole process {time.perf_counter() - started:.0f} s)", flush=True)
    return result


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        from end_to_end_model import write_model_and_prompts

        write_model_and_prompts(Path(folder), args.model, num_steps=args.steps + 1)
        results: dict[str, list[dict[str, float]]] = {"neuron": [], "trl": [], "cpu": []}
        for _ in range(args.rounds):
            for name, runs in results.items():
                runs.append(side(name, args, Path(folder)))

    def median(name: str, key: str) -> float:
        return statistics.median(run[key] for run in results[name])

    trl = median("trl", "tokens_per_cpu_s")
    print(
        json.dumps(
            {
                "bench": "end_to_end",
                "model": args.model,
                "dtype": args.dtype,
                "steps": args.steps,
                "rounds": args.rounds,
                "ratio": round(median("neuron", "tokens_per_cpu_s") / trl, 3),
                "ratio_cpu": round(median("cpu", "tokens_per_cpu_s") / trl, 3),
                "ratio_wall": round(median("neuron", "tokens_per_wall_s") / median("trl", "tokens_per_wall_s"), 3),
                "samples_per_s": round(median("neuron", "samples_per_wall_s"), 2),
                "samples_per_s_trl": round(median("trl", "samples_per_wall_s"), 2),
                "tokens_per_cpu_s": round(median("neuron", "tokens_per_cpu_s"), 1),
                "tokens_per_cpu_s_trl": round(trl, 1),
                "ray_daemons_cpu_s": round(median("neuron", "daemons_cpu_s"), 2),
                "load_average": [round(x, 2) for x in os.getloadavg()],
            }
        )
    )


if __name__ == "__main__":
    main()
