"""PyTorch's own operator samples (OpInfo) on neuron against the CPU.

    python tests/bench/opinfo.py [--dtype float32] [--samples N] [--only NAME,...] [--no-backward]

Each sample is made on the CPU and copied. A sample that the CPU itself rejects is not counted; `empty*` is compared
by shape, dtype and device only, everything else (random numbers too) within 1e-4 (bf16 1e-2), and every result must lie
on neuron. An operator passes if all its samples do. Operators run in child processes: a crash or a
hang is that operator's failure. A pass says "same as the CPU"; it cannot tell whose arithmetic it was. The last line is
JSON with `forward_rate`, `backward_rate` and the failures with their reasons.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

SECONDS_PER_OPERATOR = 20.0
# Their tensor arguments beside the input lie on the host for every device (on CUDA too).
HOST_ARGUMENTS = ("tensor_split",)
# Their results are not initialised. Random results are compared: one seed gives the CPU's numbers on neuron.
METADATA_ONLY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")


def operators(only: set[str]) -> list[Any]:
    """The OpInfo entries, in the database's order."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if not only or name_of(op) in only]


def name_of(op: Any) -> str:
    """Name and variant of an entry."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def placed(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy of `tensor` on `device` within a copy of its whole storage: views keep their surroundings."""
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor.to(device)
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return whole.to(device, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def moved(value: Any, device: str) -> Any:
    """`value` with its tensors on `device`, as leaves that require gradients where the originals do."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return placed(leaf.detach(), device).detach().requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.device) or leaf == "cpu":
            return torch.device(device)
        return leaf

    return tree_map(move, value)


def run_sample(op: Any, sample: Any, device: str, backward: bool) -> tuple[list[Any], list[torch.Tensor | None]]:
    """Output leaves and, if asked, the gradients of the sample's tensors."""
    arguments = moved((sample.input, sample.args, sample.kwargs), device)
    if op.name in HOST_ARGUMENTS:
        arguments = (arguments[0], sample.args, sample.kwargs)
    places = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor | torch.device)]
    # A factory sample that names no device means the default one.
    with contextlib.nullcontext() if places else torch.device(device):
        out = op.op(arguments[0], *arguments[1], **arguments[2])
    leaves = tree_leaves(out)
    if not backward:
        return leaves, []
    out = sample.output_process_fn_grad(out)
    roots = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    inputs = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not roots or not inputs:
        return leaves, []
    weights = [torch.ones_like(root) for root in roots]
    return leaves, list(torch.autograd.grad(roots, inputs, weights, allow_unused=True))


def difference(ours: list[Any], theirs: list[Any], metadata_only: bool, device: str, tolerance: float) -> str:
    """What differs between two lists of leaves; empty if nothing does."""
    if len(ours) != len(theirs):
        return f"{len(ours)} results, the CPU gives {len(theirs)}"
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(b, torch.Tensor):
            if a != b and not metadata_only and not (a != a and b != b) and not isinstance(b, torch.device):
                return f"{a!r} instead of {b!r}"
            continue
        if a.device.type != device:
            return f"result on {a.device}"
        if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
            return f"{a.shape} {a.dtype} {a.layout} instead of {b.shape} {b.dtype} {b.layout}"
        if not metadata_only:
            try:
                torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance, equal_nan=True)
            except AssertionError as error:
                return str(error).splitlines()[0] + " " + " ".join(str(error).split()[-12:])
    return ""


def check(op: Any, dtype: torch.dtype, limit: int, backward: bool, device: str) -> dict[str, Any]:
    """Runs up to `limit` samples of an operator; says how many ran and what failed first."""
    supported = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu") if backward else True
    if dtype not in op.supported_dtypes("cpu") or not supported:
        return {"status": "skip"}
    metadata_only = op.name in METADATA_ONLY
    tolerance = 1e-4 if dtype not in (torch.bfloat16, torch.float16) else 1e-2
    ran, deadline = 0, time.monotonic() + SECONDS_PER_OPERATOR / 2
    for index, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=backward)):
        if index >= limit or time.monotonic() > deadline:
            break
        try:
            torch.manual_seed(0)
            theirs = run_sample(op, sample, "cpu", backward)
        except Exception:
            continue  # not a sample for the CPU
        try:
            torch.manual_seed(0)
            ours = run_sample(op, sample, device, backward)
        except Exception as error:
            return {"status": "fail", "reason": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        ran += 1
        reason = difference(ours[0], theirs[0], metadata_only, device, tolerance)
        reason = reason or difference(ours[1], theirs[1], metadata_only, device, tolerance)
        if reason:
            return {"status": "fail", "reason": reason[:300]}
    return {"status": "pass" if ran else "skip", "samples": ran}


def child(arguments: argparse.Namespace) -> None:
    """Checks the operators from `--start` on and prints one JSON line for each, before and after."""
    from rlneuron.device import select

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    select.choose("neuron", simulate=True)
    dtype = getattr(torch, arguments.dtype)
    only = set(filter(None, arguments.only.split(",")))
    for index, op in enumerate(operators(only)):
        if index < arguments.start:
            continue
        print(json.dumps({"index": index, "name": name_of(op)}), flush=True)
        result = check(op, dtype, arguments.samples, arguments.child == "backward", "neuron")
        print(json.dumps({"index": index, "name": name_of(op), **result}), flush=True)


def lines_of(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """The child's JSON lines; kills it when an operator takes too long."""
    import select as io_select

    assert process.stdout is not None
    while True:
        patience = SECONDS_PER_OPERATOR * 3
        ready, _, _ = io_select.select([process.stdout], [], [], patience)
        if not ready:
            process.kill()
            process.wait()
            return
        line = process.stdout.readline()
        if not line:
            process.wait()
            return
        if line.startswith("{"):
            yield json.loads(line)


def survey(arguments: argparse.Namespace, direction: str) -> dict[str, dict[str, Any]]:
    """Results by operator, over as many child processes as crashes demand."""
    results: dict[str, dict[str, Any]] = {}
    start = 0
    while True:
        command = [sys.executable, __file__, "--child", direction, "--start", str(start), "--dtype", arguments.dtype,
                   "--samples", str(arguments.samples), "--only", arguments.only]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, bufsize=1
        )
        running: dict[str, Any] | None = None
        for line in lines_of(process):
            running = None if "status" in line else line
            if "status" in line:
                results[line["name"]] = line
        if running is None:
            if process.returncode != 0:
                raise SystemExit(f"the child ended with {process.returncode} outside an operator")
            return results
        results[running["name"]] = {"status": "fail", "reason": f"process ended with {process.returncode} or hung"}
        start = running["index"] + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-backward", action="store_true")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    summary: dict[str, Any] = {"dtype": arguments.dtype}
    for direction in ("forward",) if arguments.no_backward else ("forward", "backward"):
        results = survey(arguments, direction)
        ran = [result for result in results.values() if result["status"] != "skip"]
        failures = {name: result["reason"] for name, result in results.items() if result["status"] == "fail"}
        passed = len(ran) - len(failures)
        print(f"{direction}: {passed} of {len(ran)} operators pass, {len(results) - len(ran)} skipped")
        for name, reason in failures.items():
            print(f"  {name}: {reason}")
        summary[f"{direction}_rate"] = round(passed / max(len(ran), 1), 5)
        summary[f"{direction}_failures"] = failures
        summary[f"{direction}_not_implemented"] = [n for n, r in failures.items() if "NotImplementedError" in r]
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
