"""The frozen reference: log-probabilities of given completions, for the KL term. It is never trained here."""

from __future__ import annotations

from typing import Any

import torch

from rlneuron.trainer.batch import TrainBatch, pack, plan_micro_batches
from rlneuron.trainer.packed_model import PackedModel, disable_dropout


class Reference:
    """Scores batches with `model`, which is moved to `device` and frozen."""

    def __init__(
        self,
        model: Any,
        temperature: float,
        device: torch.device,
        *,
        bf16: bool = False,
        tokens_per_micro_batch: int = 2048,
    ) -> None:
        self.model = model.to(device).eval().requires_grad_(False)
        disable_dropout(self.model)
        self.device = device
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.packed = PackedModel(self.model, temperature=temperature, bf16=bf16, device=device)

    @torch.no_grad()
    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        """Log-probability of each completion token, at the learner's temperature; row order as in `batch`."""
        prompts, completions = batch.prompt_ids, batch.completion_ids
        result: dict[int, list[float]] = {}
        plans = plan_micro_batches(
            prompts,
            completions,
            range(len(batch)),
            tokens_per_micro_batch=self.tokens_per_micro_batch,
            share_prompts=True,
        )
        with self.packed.attention():
            for rows in plans:
                packed = pack(prompts, completions, rows, device=self.device, share_prompts=True)
                values, _ = self.packed.logprobs(packed)
                for row, part in zip(rows, values.split(packed.lengths), strict=True):
                    result[row] = part.tolist()
        return [result[row] for row in range(len(batch))]
