"""Nothing large lives beside the device: a rollout and an update of the ~15M model, watched.

Weights, gradients, optimizer state and KV cache are `neuron` tensors that count against the core's HBM, every operator
of ours is dispatched there, and a CPU tensor over 1 MB is found.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from rlneuron.device import oplog, select
from rlneuron.rollout import LLM, RequestOutput, SamplingParams
from rlneuron.trainer import Learner, LearnerConfig, TrainBatch
from tests.bench import models

MEGABYTE = 10**6
# 80 rows: the logits of one decode step take 1.3 MB.
NUM_PROMPTS, GROUP = 16, 5


@pytest.fixture(scope="module")
def device() -> torch.device:
    return select.choose("neuron", simulate=True).device


@pytest.fixture(scope="module")
def allocated_before(device: torch.device) -> int:
    """Bytes that other tests still hold on the core."""
    gc.collect()
    return torch.neuron.memory_allocated(device)


@pytest.fixture(scope="module")
def llm(device: torch.device, allocated_before: int) -> LLM:
    return LLM(models.llama("M"), None, device=device, eos_token_ids=[2], num_blocks=256)


@pytest.fixture(scope="module")
def learner(device: torch.device, allocated_before: int) -> Learner:
    config = LearnerConfig(per_device_train_batch_size=NUM_PROMPTS * GROUP, learning_rate=1e-4, max_steps=10)
    return Learner(models.llama("M"), config, device)


@pytest.fixture
def counted(device: torch.device) -> Iterator[None]:
    oplog.enable()
    oplog.reset()
    yield
    oplog.reset()


def rollout(llm: LLM) -> list[RequestOutput]:
    prompts = [[100 + index * 7 + offset for offset in range(20 + index)] for index in range(NUM_PROMPTS)]
    return llm.generate(prompts, SamplingParams(n=GROUP, max_tokens=8, seed=1, ignore_eos=True))


def update(learner: Learner, outputs: list[RequestOutput]) -> list[dict[str, float]]:
    completions = [completion for output in outputs for completion in output.outputs]
    return learner.update(
        TrainBatch(
            prompt_ids=[list(output.prompt_token_ids) for output in outputs for _ in output.outputs],
            completion_ids=[completion.token_ids for completion in completions],
            advantages=torch.linspace(-1.0, 1.0, len(completions)),
            truncated=[False] * len(completions),
            sampling_logprobs=[completion.logprobs for completion in completions],
        )
    )


def bytes_of(tensors: list[torch.Tensor]) -> int:
    """Their bytes, each storage once; all of them must be on the device."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    assert {x.device.type for x in tensors} == {"neuron"}
    return sum(storages.values())


def own_operators() -> set[str]:
    """Names of all operators of ours that this process has defined, less those of tests."""
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    return {name for name in names if name.startswith("rlneuron::") and "devicetest" not in name}


def test_a_step_allocates_nothing_large_on_the_host(llm: LLM, learner: Learner, counted: None) -> None:
    with oplog.watch_host_allocations(MEGABYTE) as found:
        outputs = rollout(llm)
        (metrics,) = update(learner, outputs)
    assert found == []
    assert sum(len(c.token_ids) for output in outputs for c in output.outputs) == NUM_PROMPTS * GROUP * 8
    assert metrics["grad_norm"] > 0
    ran = oplog.by_operator()
    assert own_operators() >= {"rlneuron::paged_attention", "rlneuron::sample_tokens", "rlneuron::varlen_attention"}
    assert own_operators() - set(ran) == set(), "an operator of ours did not run on the device"


def test_a_planted_host_tensor_is_found(llm: LLM, learner: Learner, counted: None) -> None:
    """Two megabytes on the CPU in one layer, of the rollout and of the update."""
    outputs = rollout(llm)

    def plant(*_: object) -> None:
        torch.empty(2 * MEGABYTE, dtype=torch.uint8)

    for module, step in (
        (llm.engine._model.model, lambda: rollout(llm)),
        (learner.model, lambda: update(learner, outputs)),
    ):
        hook = module.get_submodule("model.layers.3.mlp").register_forward_hook(plant)
        with oplog.watch_host_allocations(MEGABYTE) as found:
            step()
        hook.remove()
        assert found and {one.bytes for one in found} == {2 * MEGABYTE}


def test_state_lives_on_the_device_and_is_counted(
    llm: LLM, learner: Learner, device: torch.device, allocated_before: int
) -> None:
    at_the_step: list[tuple[int, int]] = []
    weights = list(learner.model.parameters())
    runner = llm.engine._runner
    engine_side = [*llm.engine._model.model.parameters(), *runner.key_caches, *runner.value_caches]

    def measure(optimizer: torch.optim.Optimizer, *_: object) -> None:
        gradients = [weight.grad for weight in weights]
        assert all(gradient is not None for gradient in gradients)
        moments = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        present = [x for x in gradients if x is not None] + weights + moments + engine_side
        at_the_step.append((bytes_of(present), torch.neuron.memory_allocated(device) - allocated_before))

    hook = learner.optimizer.register_step_pre_hook(measure)
    for _ in range(2):  # the optimizer's state is made by its first step
        update(learner, rollout(llm))
    hook.remove()
    assert len(at_the_step) == 2
    for expected, allocated in at_the_step:
        assert expected <= allocated
    one_copy = bytes_of(weights)
    caches = bytes_of([*runner.key_caches, *runner.value_caches])
    assert caches == 256 * 16 * 6 * 2 * (2 * 64) * 4, "blocks, positions, layers, keys and values, heads, float32"
    # Engine's weights, learner's weights, gradients and two moments.
    assert at_the_step[1][0] >= 5 * one_copy + caches
