"""trainer: scored sequences -> new weights.

The tour: `advantages` turns rewards into one number per completion; `batch` holds the `TrainBatch` that crosses this
room's door and packs it without padding, a prompt once for all its completions; `packed_model` runs the unmodified
Hugging Face module on that and gives log-probabilities; `losses` are TRL's policy losses as pure functions and
`objective` puts them together for one micro-batch; `learner` is the step: forward, backward, clip, AdamW; `schedules`
its learning rate. `weights` publishes what was learned through shared memory, `checkpoint` keeps it, `reference`
scores with the frozen model. `config` names every setting as TRL does.

This room knows nothing of engines, rewards, data or Ray; every class works in one process.
"""

from __future__ import annotations

from rlneuron.trainer import advantages, checkpoint, losses, schedules, weights
from rlneuron.trainer.batch import TrainBatch
from rlneuron.trainer.config import LearnerConfig
from rlneuron.trainer.learner import Learner
from rlneuron.trainer.reference import Reference

__all__ = [
    "Learner",
    "LearnerConfig",
    "Reference",
    "TrainBatch",
    "advantages",
    "checkpoint",
    "losses",
    "schedules",
    "weights",
]
