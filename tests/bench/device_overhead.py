"""What the simulated device costs over the CPU: whole training steps and single operators, operator log on.

    python tests/bench/device_overhead.py [--steps N] [--repeats N] [--models S,M]

One process, one thread; cpu and neuron alternate, so that a busy machine slows both. `ratio_15m` and `ratio_1m` are
medians of the paired CPU-time ratios of forward + backward + AdamW on 8 x 128 tokens in fp32; `us_per_op` is the most
that one of the operators named below costs more than on the CPU (minimum over repetitions of each). The last line is
JSON.
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

BATCH, LENGTH = 8, 128


def step_of(name: str, device: str) -> Callable[[], float]:
    """A function that does one training step of model `name` on `device` and returns its loss."""
    model = llama(name).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    tokens = torch.randint(2, vocabulary, (BATCH, LENGTH), generator=generator).to(device)

    def step() -> float:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def clocked(step: Callable[[], object]) -> float:
    """CPU seconds of this process (all threads) for one call."""
    start = time.process_time()
    step()
    return time.process_time() - start


def training_ratio(name: str, steps: int) -> dict[str, float]:
    """Median over pairs of neuron over cpu, the order changing from pair to pair; losses are compared too."""
    on = {device: step_of(name, device) for device in ("cpu", "neuron")}
    losses = {device: [step() for _ in range(3)] for device, step in on.items()}
    ratios, seconds = [], {"cpu": [0.0], "neuron": [0.0]}
    for pair in range(steps):
        order = ("cpu", "neuron") if pair % 2 == 0 else ("neuron", "cpu")
        took = {device: clocked(on[device]) for device in order}
        ratios.append(took["neuron"] / took["cpu"])
        for device in order:
            seconds[device].append(took[device])
    return {
        "ratio": statistics.median(ratios),
        "cpu_ms": 1e3 * min(seconds["cpu"][1:]),
        "neuron_ms": 1e3 * min(seconds["neuron"][1:]),
        "loss_difference": max(abs(a - b) for a, b in zip(losses["cpu"], losses["neuron"], strict=True)),
    }


def operators(device: str) -> dict[str, Callable[[], object]]:
    """The operators that are timed."""
    small, wide = torch.randn(16, device=device), torch.randn(32, 64, device=device)
    square, weight = torch.randn(64, 64, device=device), torch.randn(64, device=device)
    return {
        "add 16": lambda: torch.add(small, small),
        "mul_ 16": lambda: small.mul_(1.0),
        "view": lambda: wide.view(64, 32),
        "empty": lambda: torch.empty(16, device=device),
        "layer_norm 32x64": lambda: torch.nn.functional.layer_norm(wide, (64,), weight, weight),
        "mm 64": lambda: torch.mm(square, square),
        "cat": lambda: torch.cat((small, small)),
    }


def operator_costs(repeats: int, calls: int = 400) -> dict[str, dict[str, float]]:
    """Microseconds per call on both devices, minimum over interleaved repetitions."""
    on = {device: operators(device) for device in ("cpu", "neuron")}
    best = {name: {"cpu": float("inf"), "neuron": float("inf")} for name in on["cpu"]}
    with torch.no_grad():
        for _ in range(repeats):
            for name, row in best.items():
                for device in ("cpu", "neuron"):
                    call = on[device][name]
                    start = time.perf_counter()
                    for _ in range(calls):
                        call()
                    row[device] = min(row[device], 1e6 * (time.perf_counter() - start) / calls)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--models", default="S,M")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    select.choose("neuron", simulate=True)
    oplog.enable()
    costs = operator_costs(arguments.repeats)
    for name, row in costs.items():
        print(f"{name:18} cpu {row['cpu']:7.2f} us  neuron {row['neuron']:7.2f} us  {row['neuron'] - row['cpu']:+.2f}")
    result: dict[str, float] = {"us_per_op": max(row["neuron"] - row["cpu"] for row in costs.values())}
    for name in arguments.models.split(","):
        figures = training_ratio(name, arguments.steps * (4 if name == "S" else 1))
        print(name, {key: round(value, 4) for key, value in figures.items()})
        result[{"S": "ratio_1m", "M": "ratio_15m"}[name]] = figures["ratio"]
    print(json.dumps({key: round(value, 4) for key, value in result.items()}))


if __name__ == "__main__":
    main()
