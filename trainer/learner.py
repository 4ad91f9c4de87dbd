"""The learner: scored generation batches in, new weights and metrics out.

It does not generate, score or move weights to the engine. `update` reads like a GRPO step: shuffle, divide into
optimizer steps, pack into micro-batches, forward, loss, backward, clip, AdamW. Gradients of an optimizer step are
sums over its micro-batches of parts that are already normalised, so how they are packed changes nothing but rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.nn.utils.rnn import pad_sequence

from rlneuron.trainer import checkpoint, losses
from rlneuron.trainer.batch import PackedRows, TrainBatch, pack, pad_rows, plan_micro_batches, unpack
from rlneuron.trainer.config import LearnerConfig
from rlneuron.trainer.objective import MicroBatch, Parts, metrics, objective
from rlneuron.trainer.packed_model import PackedModel, disable_dropout
from rlneuron.trainer.schedules import learning_rate


class Learner:
    """Trains `model` in place by GRPO on one device. Parameters, gradients and AdamW's state stay float32 there."""

    def __init__(self, model: Any, config: LearnerConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.model = model.to(device=device, dtype=torch.float32)
        self.global_step = 0
        self.num_batches = 0
        if config.disable_dropout:
            disable_dropout(self.model)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.train()
        self.packed = PackedModel(self.model, temperature=config.temperature, bf16=config.bf16, device=device)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = self._make_optimizer()

    def _make_optimizer(self) -> torch.optim.AdamW:
        config = self.config
        matrices = [p for p in self.parameters.values() if p.ndim >= 2]
        vectors = [p for p in self.parameters.values() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            fused=True,
        )

    def update(self, batch: TrainBatch) -> list[dict[str, float]]:
        """Trains on one generation batch, to max_steps at most; returns each optimizer step's metrics, by TRL's names.

        Raises ValueError for a batch that does not fit the configuration, FloatingPointError for a loss or gradient
        that is not finite; in both cases the weights are those after the last good step.
        """
        config = self.config
        self._check(batch)
        steps = self._divide(len(batch))
        counts = batch.trained_counts(mask_truncated=config.mask_truncated_completions)
        plans = [self._plan(batch, rows, counts) for rows in steps]
        old: dict[int, Tensor] | None = None
        with self.packed.attention():
            if config.steps_per_batch > 1:
                # The first step's old log-probabilities are its own; the packing is that of the training pass, so
                # that the ratio of unchanged weights is exactly 1.
                old = {row: x for plan in plans[1:] for part in plan for row, x in self._score(batch, part).items()}
            results = []
            for _ in range(config.num_iterations):
                for rows, plan in zip(steps, plans, strict=True):
                    if self.global_step < config.max_steps:  # the last batch of a run may be used in part, as in TRL
                        results.append(self._step(batch, rows, plan, counts, old))
        self.num_batches += 1
        return results

    def logprobs(self, batch: TrainBatch) -> list[Tensor]:
        """Log-probability of each completion token under the current weights, one float32 tensor per row."""
        rows = list(range(len(batch)))
        with self.packed.attention():
            parts = [self._score(batch, part) for part in self._pack_plan(batch, rows)]
        scored = {row: x for part in parts for row, x in part.items()}
        return [scored[row] for row in rows]

    def state_dict_for_sync(self) -> dict[str, Tensor]:
        """What the engine needs: parameters (tied ones once) and persistent buffers, detached, on the device."""
        skipped = {
            f"{name}.{b}" if name else b
            for name, m in self.model.named_modules()
            for b in m._non_persistent_buffers_set
        }
        buffers = {name: b for name, b in self.model.named_buffers() if name not in skipped}
        return {name: x.detach() for name, x in [*self.model.named_parameters(), *buffers.items()]}

    def save(self, folder: Path | str) -> None:
        """Writes the full training state into `folder`: model, optimizer, step, random state. Not atomic: see
        `checkpoint.save`, which is."""
        checkpoint.save_training_state(self, Path(folder))

    def load(self, folder: Path | str) -> None:
        """Restores what `save` wrote, bit for bit; raises ValueError naming the file that does not fit."""
        checkpoint.load_training_state(self, Path(folder))

    def _check(self, batch: TrainBatch) -> None:
        config = self.config
        if len(batch) != config.rows_per_generation:
            raise ValueError(
                f"the generation batch has {len(batch)} completions; per_device_train_batch_size: "
                f"{config.per_device_train_batch_size} * steps_per_generation: {config.micro_steps_per_generation} "
                f"= {config.rows_per_generation} are needed."
            )
        if config.beta > 0 and batch.ref_logprobs is None:
            raise ValueError(f"beta: {config.beta} needs the reference's log-probabilities; the batch has none.")
        if not bool(batch.advantages.isfinite().all()):
            row = int((~batch.advantages.isfinite()).nonzero()[0])
            raise ValueError(f"advantage of row {row} is {batch.advantages[row].item()}; rewards must be finite.")

    def _divide(self, num_rows: int) -> list[list[int]]:
        """Rows of each optimizer step: shuffled as a function of seed and batch number alone, for resuming."""
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.num_batches)
        order = torch.randperm(num_rows, generator=generator).tolist()
        size = self.config.rows_per_step
        return [order[start : start + size] for start in range(0, num_rows, size)]

    def _pack_plan(self, batch: TrainBatch, rows: Sequence[int]) -> list[list[int]]:
        return plan_micro_batches(
            batch.prompt_ids,
            batch.completion_ids,
            rows,
            tokens_per_micro_batch=self.config.tokens_per_micro_batch,
            share_prompts=self.config.share_prompts,
        )

    def _needs_gradient(self, batch: TrainBatch, row: int) -> bool:
        return batch.advantages[row].item() != 0.0 or self.config.beta > 0 or self.config.entropy_coef != 0.0

    def _plan(self, batch: TrainBatch, rows: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        """Micro-batches of one optimizer step. Rows without trained tokens are left out (they count all the same in
        the denominators), and rows whose gradient is exactly zero are packed apart: their backward is skipped."""
        trained = [row for row in rows if counts[row] > 0]
        moving = [row for row in trained if self._needs_gradient(batch, row)]
        still = [row for row in trained if not self._needs_gradient(batch, row)]
        return self._pack_plan(batch, moving) + self._pack_plan(batch, still)

    def _pack(self, batch: TrainBatch, rows: Sequence[int]) -> PackedRows:
        return pack(
            batch.prompt_ids,
            batch.completion_ids,
            rows,
            device=self.device,
            share_prompts=self.config.share_prompts,
        )

    @torch.no_grad()
    def _score(self, batch: TrainBatch, rows: Sequence[int]) -> dict[int, Tensor]:
        packed = self._pack(batch, rows)
        logprobs, _ = self.packed.logprobs(packed)
        return dict(zip(packed.rows, logprobs.split(packed.lengths), strict=True))

    def _step(
        self,
        batch: TrainBatch,
        rows: Sequence[int],
        plan: Sequence[Sequence[int]],
        counts: Sequence[int],
        old: dict[int, Tensor] | None,
    ) -> dict[str, float]:
        """One optimizer step on `rows`."""
        policy, entropy = self._row_weights(rows, counts)
        parts = [
            self._forward_backward(
                batch,
                part,
                old,
                torch.tensor([policy[row] for row in part], device=self.device),
                torch.tensor([entropy[row] for row in part], device=self.device) if entropy else None,
            )
            for part in plan
        ]
        result = metrics(self.config, parts, len(rows))
        result |= self._optimizer_step(result["loss"], any(counts[row] for row in rows))
        result["num_trained_tokens"] = float(sum(counts[row] for row in rows))
        result["completions/masked_ratio"] = sum(counts[row] == 0 for row in rows) / len(rows)
        return result

    def _row_weights(
        self, rows: Sequence[int], counts: Sequence[int]
    ) -> tuple[dict[int, float], dict[int, float] | None]:
        """Weight of each row in the policy loss and in the mean entropy (None without entropy_coef)."""
        config = self.config
        counts_B = torch.tensor([counts[row] for row in rows], dtype=torch.float32)

        def weights(loss_type: str) -> dict[int, float]:
            values = losses.row_weights(
                loss_type,
                counts_B,
                num_rows=len(rows),
                num_tokens=float(counts_B.sum()),
                max_completion_length=config.max_completion_length,
                micro_step_rows=config.per_device_train_batch_size,
            )
            return dict(zip(rows, values.tolist(), strict=True))

        # TRL's entropy bonus is a mean over the tokens of each micro step, whatever the loss type: bnpo's weights.
        return weights(config.loss_type), weights("bnpo") if config.entropy_coef else None

    def _forward_backward(
        self,
        batch: TrainBatch,
        rows: Sequence[int],
        old: dict[int, Tensor] | None,
        row_weights_B: Tensor,
        entropy_weights_B: Tensor | None,
    ) -> Parts:
        """Adds the gradient of these rows' part of the loss."""
        packed = self._pack(batch, rows)
        with torch.set_grad_enabled(self._needs_gradient(batch, rows[0])):
            logprobs, entropies = self.packed.logprobs(packed)
            logp = unpack(logprobs, packed.lengths)
            if old is None:
                old_BT = logp.detach()
            else:
                for row, values in zip(packed.rows, logprobs.detach().split(packed.lengths), strict=True):
                    old.setdefault(row, values)
                old_BT = pad_sequence([old[row] for row in rows], batch_first=True)
            loss, parts = objective(
                self.config,
                MicroBatch(
                    logp=logp,
                    entropy=unpack(entropies, packed.lengths),
                    mask=self._mask(batch, rows),
                    old=old_BT,
                    advantages_B1=batch.advantages[list(rows)].float()[:, None].to(self.device),
                    row_weights_B=row_weights_B,
                    entropy_weights_B=entropy_weights_B,
                    sampling=self._padded(batch.sampling_logprobs, rows),
                    ref=self._padded(batch.ref_logprobs, rows) if self.config.beta > 0 else None,
                ),
            )
        if loss.requires_grad:
            loss.backward()
        return parts

    def _mask(self, batch: TrainBatch, rows: Sequence[int]) -> Tensor:
        masks = batch.loss_mask or [[1] * len(completion) for completion in batch.completion_ids]
        return pad_rows([masks[row] for row in rows], device=self.device)

    def _padded(self, values: list[list[float]] | None, rows: Sequence[int]) -> Tensor | None:
        return None if values is None else pad_rows([values[row] for row in rows], device=self.device)

    def _optimizer_step(self, loss: float, any_trained: bool) -> dict[str, float]:
        """Clips and applies the accumulated gradients, or refuses; either way they are gone afterwards.

        A step without a single trained token (all completions truncated and masked) counts, moves the schedule and
        leaves weights and moments as they are.
        """
        config = self.config
        rate = learning_rate(
            self.global_step,
            peak=config.learning_rate,
            kind=config.lr_scheduler_type,
            warmup_steps=config.warmup_steps,
            max_steps=config.max_steps,
        )
        norm = 0.0
        parameters = list(self.parameters.values())
        if any_trained:
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            total_norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
            norm = total_norm.item()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self.optimizer.zero_grad()
                raise FloatingPointError(
                    f"optimizer step {self.global_step}: the loss is {loss} and the gradient norm {norm}; the weights "
                    "were left as they were. Lower learning_rate, or look at the rewards of this batch."
                )
            if config.max_grad_norm > 0:
                clip_grads_with_norm_(parameters, config.max_grad_norm, total_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.global_step += 1
        return {"grad_norm": norm, "learning_rate": rate, "skipped_update": float(not any_trained)}
