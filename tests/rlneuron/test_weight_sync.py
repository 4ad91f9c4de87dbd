"""Learner -> shared memory -> engine: after every sync both compute the same logits, and no old prefix is served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlneuron import models
from rlneuron.device import select
from rlneuron.device.shm import SharedTensors
from rlneuron.rollout import LLM, SamplingParams
from rlneuron.trainer import Learner, LearnerConfig, TrainBatch

PROMPT = list(range(5, 30))


def logits(module: torch.nn.Module) -> torch.Tensor:
    """[1, T, V] of the whole module, by its plain forward."""
    device = next(module.parameters()).device
    with torch.no_grad():
        return module(input_ids=torch.tensor([PROMPT], device=device), use_cache=False).logits.cpu()


@pytest.mark.parametrize("device", ["cpu", "neuron"])
def test_engine_and_learner_have_equal_logits_after_every_sync(device: str, tiny: Path, tmp_path: Path) -> None:
    hardware = select.choose(device)  # type: ignore[arg-type]
    policy, copy = (models.load(str(tiny / "model"), dtype=torch.float32) for _ in range(2))
    llm = LLM(copy.module, copy.tokenizer, device=hardware.device, eos_token_ids=copy.eos_token_ids)
    config = LearnerConfig(learning_rate=1e-2, lr_scheduler_type="constant", max_steps=3, per_device_train_batch_size=4)
    learner = Learner(policy.module, config, hardware.device)
    sent = SharedTensors.create(str(tmp_path / "segment"), learner.state_dict_for_sync())
    received = SharedTensors.open(str(tmp_path / "segment"))
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    before = logits(copy.module)
    for version in (1, 2, 3):
        (output,) = llm.generate([PROMPT], SamplingParams(n=4, max_tokens=6, seed=version, ignore_eos=True))
        learner.update(
            TrainBatch(
                prompt_ids=[PROMPT] * 4,
                completion_ids=[c.token_ids for c in output.outputs],
                advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]),
                sampling_logprobs=[c.logprobs for c in output.outputs],
                truncated=[False] * 4,
            )
        )
        manifest = sent.write(version, learner.state_dict_for_sync())
        llm.engine.update_weights(manifest.version, received.read(manifest))

        new = logits(copy.module)
        assert torch.equal(new, logits(policy.module))
        assert (new - before).abs().max() > 1e-3, "the update must show"
        # The prompt's blocks of the old weights are still in the cache; they must not be served.
        after = llm.generate([PROMPT], greedy)[0]
        assert after.num_cached_tokens == 0
        assert set(after.outputs[0].weight_versions) == {version}
        longer = torch.tensor([PROMPT + after.outputs[0].token_ids], device=hardware.device)
        with torch.no_grad():
            expected = policy.module(input_ids=longer, use_cache=False).logits[0, len(PROMPT) - 1 : -1].cpu()
        assert after.outputs[0].token_ids == expected.argmax(-1).tolist()
        chosen = expected.log_softmax(-1).amax(-1)
        assert after.outputs[0].model_logprobs == pytest.approx(chosen.tolist(), abs=1e-5)
        before = new
    sent.close(unlink=True)
