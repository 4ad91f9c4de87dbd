"""The run's actors, placed on cores, and the calls that the controller makes of them.

Roles in bundle order: learner, rollout-0 .. rollout-(N-1), reference (when beta > 0); each on a core of its own.
Reward actors hold no core. Every call waits with a deadline and names the actor that failed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlneuron.actors import LearnerActor, ReferenceActor, RolloutActor
from rlneuron.batch_arithmetic import BatchArithmetic
from rlneuron.config import RunConfig
from rlneuron.reward_actor import RewardActor
from rlneuron.rewards import RewardBatch, RewardMatrix
from rlneuron.rollout import RequestOutput, SamplingParams
from rlneuron.trainer import TrainBatch
from rlneuron.usage import Usage
from rlneuron.waiting import Owner, wait

# Passed to every worker; the rest of the environment is Ray's own business.
WORKER_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1"}


def roles(config: RunConfig) -> list[str]:
    """Names of the actors that hold a core, in bundle order."""
    names = ["learner", *(f"rollout-{rank}" for rank in range(config.rollout.num_workers))]
    return [*names, "reference"] if config.algo.beta > 0 else names


def split_evenly(count: int, parts: int) -> list[range]:
    """Contiguous ranges of near-equal size that cover 0 .. count; empty ones are left out."""
    edges = [count * part // parts for part in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges) if b > a]


class Workers:
    """All actors of one run."""

    def __init__(
        self,
        config: RunConfig,
        arithmetic: BatchArithmetic,
        *,
        model_path: str,
        group: PlacementGroup | None,
        resource: str | None,
        segment_path: Path,
        stack: ExitStack,
    ) -> None:
        """Starts every actor and waits until all are up; `stack` ends them."""
        self._config = config
        self._group = group
        self._resource = resource
        self._timeout_s = config.ray.phase_timeout_s
        self.owners: list[Owner] = []
        stack.callback(self.close)
        placed = roles(config)
        handles = {
            "learner": self._place(LearnerActor, "learner", 0).remote(
                config, arithmetic, model_path, 0, str(segment_path)
            ),
            **{
                name: self._place(RolloutActor, name, placed.index(name)).remote(config, model_path, rank)
                for rank, name in enumerate(placed[1 : 1 + config.rollout.num_workers])
            },
        }
        if "reference" in placed:
            bundle = placed.index("reference")
            handles["reference"] = self._place(ReferenceActor, "reference", bundle).remote(config, model_path, 0)
        for rank in range(config.reward.num_workers):
            handles[f"reward-{rank}"] = self._place(RewardActor, f"reward-{rank}", None).remote(config, rank)
        self.owners = [Owner(name, handle, 0) for name, handle in handles.items()]
        self.owners = self._await_start(config.ray.start_timeout_s)
        by_role = {role: [o for o in self.owners if o.name.split("-")[0] == role] for role in _ROLE_NAMES}
        self._learner = by_role["learner"]
        self._rollouts = by_role["rollout"]
        self._reference = by_role["reference"]
        self._rewards = by_role["reward"]

    def _place(self, actor: type, name: str, bundle: int | None) -> Any:
        """`actor` as a Ray class on the core of its bundle; `bundle` None: it holds no core."""
        # No restarts: a learner that comes back has lost its weights, so a death ends the run.
        options: dict[str, Any] = {
            "name": name,
            "num_cpus": 0,
            "max_restarts": 0,
            "runtime_env": {"env_vars": WORKER_ENV},
        }
        if self._group is not None and bundle is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=bundle
            )
            if self._resource == "GPU":
                options["num_gpus"] = 1
            else:
                options["resources"] = {self._resource: 1}
        return ray.remote(actor).options(**options)

    def _await_start(self, timeout_s: float) -> list[Owner]:
        refs = [owner.handle.pid.remote() for owner in self.owners]
        pids = wait(self.owners, refs, task="start", timeout_s=timeout_s, key="ray.start_timeout_s")
        return [Owner(o.name, o.handle, pid) for o, pid in zip(self.owners, pids, strict=True)]

    def _call(self, owners: Sequence[Owner], refs: Sequence[Any], task: str) -> list[Any]:
        return wait(owners, refs, task=task, timeout_s=self._timeout_s, key="ray.phase_timeout_s")

    def describe(self) -> list[str]:
        devices = [*self._learner, *self._rollouts, *self._reference]
        return self._call(devices, [o.handle.describe.remote() for o in devices], "describe its device")

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        """Completions of every prompt, in the order of the prompts; the workers share them in contiguous parts."""
        parts = split_evenly(len(prompts), len(self._rollouts))
        owners = self._rollouts[: len(parts)]
        refs = [
            owner.handle.generate.remote(prompts[part.start : part.stop], params[part.start : part.stop])
            for owner, part in zip(owners, parts, strict=True)
        ]
        return [output for outputs in self._call(owners, refs, "generate") for output in outputs]

    def score(self, batch: RewardBatch) -> RewardMatrix:
        """One reward row per completion. Whole groups stay together: a function may compare completions."""
        parts = split_evenly(batch.num_groups, len(self._rewards))
        owners = self._rewards[: len(parts)]
        refs = [o.handle.score.remote(batch.groups(part)) for o, part in zip(owners, parts, strict=True)]
        return RewardMatrix.concatenate(self._call(owners, refs, "score completions"))

    def reference_logprobs(self, batch: TrainBatch) -> list[list[float]]:
        return self._call(
            self._reference, [self._reference[0].handle.logprobs.remote(batch)], "score log-probabilities"
        )[0]

    def update(self, batch: TrainBatch) -> list[dict[str, float]]:
        return self._call(self._learner, [self._learner[0].handle.update.remote(batch)], "update")[0]

    def sync_weights(self, version: int) -> None:
        """Learner -> shared memory -> every rollout worker; each confirms the version."""
        manifest = self._call(self._learner, [self._learner[0].handle.publish.remote(version)], "publish weights")[0]
        refs = [o.handle.load_weights.remote(manifest) for o in self._rollouts]
        versions = self._call(self._rollouts, refs, "load weights")
        assert versions == [version] * len(self._rollouts), f"workers hold {versions}, published was {version}"

    def save(self, output_dir: Path, extra_state: Mapping[str, Any]) -> Path:
        ref: Any = self._learner[0].handle.save.remote(str(output_dir), extra_state)
        return Path(self._call(self._learner, [ref], "save a checkpoint")[0])

    def load(self, folder: Path) -> dict[str, Any]:
        return self._call(self._learner, [self._learner[0].handle.load.remote(str(folder))], "load a checkpoint")[0]

    def usage(self) -> dict[str, Usage]:
        values = self._call(self.owners, [o.handle.usage.remote() for o in self.owners], "report its usage")
        return {owner.name: value for owner, value in zip(self.owners, values, strict=True)}

    def close(self) -> None:
        """Ends every actor; safe to call when some are dead."""
        for owner in self.owners:
            ray.kill(owner.handle, no_restart=True)
        if self._group is not None:
            remove_placement_group(self._group)


_ROLE_NAMES = ("learner", "rollout", "reference", "reward")
