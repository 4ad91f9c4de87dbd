"""Our engine against a peer: tokens per CPU second, one thread, alternating in one process.

    python tests/bench/rollout.py --model S --dtype fp32 --device cpu --peer hf

Workload: 16 prompts x 8 samples, prompts of 32 to 128 tokens, 64 to 256 forced new tokens (fixed by seed), temperature
1, log-probability of every token from ours. Hugging Face `generate` is run as TRL runs it (left padded, dynamic cache,
sdpa); it cannot vary lengths, so it generates to the longest, and only the wanted tokens are counted. Its time does not
include log-probabilities, for which TRL runs a second forward pass. Ours on `neuron` is compared with the peer on the
CPU. CPU time of this process (`time.process_time`), medians over the rounds. The last line is JSON: `ratio` is ours
over the peer's tokens per CPU second.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import time
from collections.abc import Callable

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from models import llama
from workload import Wanted, workload

from rlneuron.device import select
from rlneuron.rollout import LLM, SamplingParams

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["S", "M"], default="S")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--device", choices=["cpu", "neuron"], default="cpu")
    parser.add_argument("--peer", choices=["hf", "none"], default="hf")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def hugging_face(model: torch.nn.Module, wanted: list[Wanted]) -> Callable[[], object]:
    """`generate` over the whole batch, left padded, to the longest."""
    width = max(len(w.prompt) for w in wanted)
    ids = torch.zeros(len(wanted), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, w in enumerate(wanted):
        ids[row, width - len(w.prompt) :] = torch.tensor(w.prompt)
        mask[row, width - len(w.prompt) :] = 1
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}

    def run() -> object:
        with torch.no_grad():
            return model.generate(  # type: ignore[operator]
                input_ids=ids, attention_mask=mask, max_new_tokens=max(w.num_tokens for w in wanted), **options
            )

    return run


def ours(llm: LLM, wanted: list[Wanted]) -> Callable[[], object]:
    """One request per sequence: lengths differ within a prompt, so samples meet in the prefix cache, not by a fork.

    The prefix cache is dropped before each run, as after a weight update.
    """
    prompts = [w.prompt for w in wanted]
    params = [SamplingParams(max_tokens=w.num_tokens, ignore_eos=True) for w in wanted]

    def run() -> object:
        llm.engine.reset_prefix_cache()
        return llm.generate(prompts, params)

    return run


def cpu_seconds(run: Callable[[], object]) -> tuple[float, float]:
    """(CPU, wall) seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    args = arguments()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    hardware = select.choose(args.device)
    wanted = workload(llama(args.model).config.vocab_size)  # type: ignore[union-attr, arg-type]
    tokens = sum(w.num_tokens for w in wanted)
    llm = LLM(llama(args.model).to(DTYPES[args.dtype]), device=hardware.device, max_num_seqs=128)
    sides = {"ours": ours(llm, wanted)}
    if args.peer == "hf":
        sides["hf"] = hugging_face(llama(args.model).to(DTYPES[args.dtype]), wanted)
    llm.generate([wanted[0].prompt], SamplingParams(max_tokens=8, ignore_eos=True))  # first-use costs
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(args.rounds):
        for name, run in sides.items():
            cpu_s, wall_s = cpu_seconds(run)
            seconds[name].append(cpu_s)
            print(f"round {number} {name:5s} {cpu_s:7.2f} CPU s {wall_s:7.2f} wall s", flush=True)
    rate = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    result = {
        "bench": "rollout",
        "model": args.model,
        "dtype": args.dtype,
        "device": args.device,
        "tokens": tokens,
        "tokens_per_cpu_s": round(rate["ours"]),
        "peer": args.peer,
        "load_average": os.getloadavg()[0],
        "steps_per_round": llm.engine.stats.steps // args.rounds,
    }
    if "hf" in rate:
        result |= {"peer_tokens_per_cpu_s": round(rate["hf"]), "ratio": round(rate["ours"] / rate["hf"], 2)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
