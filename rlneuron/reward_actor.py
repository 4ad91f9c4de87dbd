"""The actor that runs reward functions. It holds no core and loads no model, so that it starts quickly."""

from __future__ import annotations

import os
import time

import torch

from rlneuron.config import RunConfig
from rlneuron.rewards import RewardBatch, RewardMatrix, RewardScorer
from rlneuron.usage import Usage


class RewardActor:
    """Runs reward functions. Holds no core."""

    def __init__(self, config: RunConfig, rank: int) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        self.scorer = RewardScorer.from_config(config)

    def __repr__(self) -> str:
        return f"Reward(rank={self.rank})"

    def pid(self) -> int:
        return os.getpid()

    def score(self, batch: RewardBatch) -> RewardMatrix:
        return self.scorer.score(batch)

    def usage(self) -> Usage:
        return Usage(time.process_time(), 0, 0, 0, 0)
