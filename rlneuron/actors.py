"""The classes that Ray runs as actors: thin shells around plain classes that also work in one process without Ray.

Each actor chooses its hardware (`device.select`), builds its class and forwards calls. Device actors see their
core through `NEURON_RT_VISIBLE_CORES`, which Ray sets from the placement group. Reward actors are in reward_actor.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from rlneuron import models
from rlneuron.batch_arithmetic import BatchArithmetic
from rlneuron.config import RunConfig
from rlneuron.device import oplog, select
from rlneuron.device.shm import Manifest, SharedTensors
from rlneuron.learner_config import learner_config
from rlneuron.rollout import LLM, RequestOutput, SamplingParams
from rlneuron.trainer import Learner, Reference, TrainBatch, checkpoint
from rlneuron.usage import Usage


class DeviceProcess:
    """What learner, rollout worker and reference share: one device, one copy of the model."""

    role = "device"

    def __init__(self, config: RunConfig, model_path: str, rank: int) -> None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.rank = rank
        self.config = config
        self.hardware = select.choose(
            config.device.type,
            instance=config.device.instance,
            simulate=config.device.simulate,
            hbm_gib=config.device.hbm_gib,
            numerics=config.device.numerics,
        )
        if self.hardware.simulated:
            oplog.enable()
        torch.manual_seed(config.train.seed)
        transformers_logging.disable_progress_bar()  # a bar in a worker's log is noise in the driver's terminal
        self.loaded = models.load(
            model_path, dtype=models.DTYPES[config.model.dtype], trust_remote_code=config.model.trust_remote_code
        )

    def __repr__(self) -> str:
        core = os.environ.get("NEURON_RT_VISIBLE_CORES", "")
        where = f"core {core}" if core else str(self.hardware.device)
        return f"{self.role.capitalize()}(rank={self.rank}, {where})"

    def pid(self) -> int:
        return os.getpid()

    def describe(self) -> str:
        return f"{self!r} on {self.hardware.description}"

    def usage(self) -> Usage:
        totals = oplog.totals() if self.hardware.simulated else oplog.OpTotals(0, 0, 0)
        device = self.hardware.device
        peak = 0 if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)
        return Usage(time.process_time(), totals.ops, totals.flops, totals.bytes, peak)


class LearnerActor(DeviceProcess):
    """Owns the weights being trained, the optimizer, and the segment through which weights go out."""

    role = "learner"

    def __init__(
        self, config: RunConfig, arithmetic: BatchArithmetic, model_path: str, rank: int, segment_path: str
    ) -> None:
        super().__init__(config, model_path, rank)
        self.learner = Learner(self.loaded.module, learner_config(config, arithmetic), self.hardware.device)
        self.segment = SharedTensors.create(segment_path, self.learner.state_dict_for_sync())

    def update(self, batch: TrainBatch) -> list[dict[str, float]]:
        return self.learner.update(batch)

    def publish(self, version: int) -> Manifest:
        """Writes the weights into shared memory as `version`."""
        return self.segment.write(version, self.learner.state_dict_for_sync())

    def save(self, output_dir: str, extra_state: Mapping[str, Any]) -> str:
        """An atomic `checkpoint-<step>` below `output_dir`; returns its path."""
        folder = checkpoint.save(
            Path(output_dir),
            self.learner,
            tokenizer=self.loaded.tokenizer,
            extra_state=extra_state,
            save_total_limit=self.config.train.save_total_limit,
        )
        return str(folder)

    def load(self, folder: str) -> dict[str, Any]:
        """Restores weights, optimizer, schedule and RNG; returns the caller's extra state."""
        return checkpoint.load(Path(folder), self.learner)

    def close(self) -> None:
        self.segment.close(unlink=True)


class RolloutActor(DeviceProcess):
    """One engine on one core."""

    role = "rollout"

    def __init__(self, config: RunConfig, model_path: str, rank: int) -> None:
        super().__init__(config, model_path, rank)
        self.llm = LLM(
            self.loaded.module,
            self.loaded.tokenizer,
            device=self.hardware.device,
            max_num_seqs=config.rollout.max_num_seqs,
            max_num_batched_tokens=config.rollout.max_num_batched_tokens,
            kv_cache_tokens=config.rollout.kv_cache_tokens,
            enable_prefix_caching=config.rollout.enable_prefix_caching,
            eos_token_ids=self.loaded.eos_token_ids,
            seed=config.train.seed,
        )
        self.segment: SharedTensors | None = None

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        return self.llm.generate(prompts, params)

    def load_weights(self, manifest: Manifest) -> int:
        """Takes over the published weights, checked; returns their version."""
        if self.segment is None:
            self.segment = SharedTensors.open(manifest.path)
        self.llm.engine.update_weights(manifest.version, self.segment.read(manifest))
        return manifest.version

    def usage(self) -> Usage:
        counters = {name: float(value) for name, value in asdict(self.llm.engine.stats).items()}
        return replace(super().usage(), engine=counters)


class ReferenceActor(DeviceProcess):
    """The frozen model that the KL term compares with."""

    role = "reference"

    def __init__(self, config: RunConfig, model_path: str, rank: int) -> None:
        super().__init__(config, model_path, rank)
        self.reference = Reference(self.loaded.module, config.rollout.temperature, self.hardware.device)

    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        return self.reference.logprobs(batch)
