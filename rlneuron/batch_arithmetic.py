"""How many prompts, completions, steps and cores follow from the keys of a run: TRL's arithmetic, computed once.

One generation batch = P prompts x G completions. It is cut into `steps_per_generation` micro steps of
`per_device_train_batch_size` completions, every `gradient_accumulation_steps` micro steps end in an optimizer step,
and the batch is passed over `num_iterations` times. There is one learner core, so TRL's number of processes is 1.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlneuron.config_errors import Problem
from rlneuron.config_sections import RolloutSection, TrainSection

if TYPE_CHECKING:
    from rlneuron.config import RunConfig

LEARNER_CORES = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchArithmetic:
    """Numbers per generation batch unless they say otherwise.

    Example: 8 completions per micro step, 4 micro steps, groups of 8 -> 32 completions of 4 prompts.
    """

    num_generations: int
    per_device_train_batch_size: int
    steps_per_generation: int
    gradient_accumulation_steps: int
    num_iterations: int
    max_completion_length: int
    given_max_steps: int
    """train.max_steps; -1: num_train_epochs decides."""
    num_train_epochs: float
    rollout_cores: int
    reference_cores: int
    num_prompts: int | None = None
    """Training prompts; None until the data is read."""

    @staticmethod
    def from_config(config: "RunConfig", num_prompts: int | None = None) -> "BatchArithmetic":
        """From a checked configuration (`batch_problems` is empty)."""
        rollout, train, algo = config.rollout, config.train, config.algo
        return BatchArithmetic(
            num_generations=rollout.num_generations,
            per_device_train_batch_size=train.per_device_train_batch_size,
            steps_per_generation=steps_per_generation(train),
            gradient_accumulation_steps=train.gradient_accumulation_steps,
            num_iterations=algo.num_iterations,
            max_completion_length=rollout.max_completion_length,
            given_max_steps=train.max_steps,
            num_train_epochs=train.num_train_epochs,
            rollout_cores=rollout.num_workers,
            reference_cores=1 if algo.beta > 0 else 0,
            num_prompts=num_prompts,
        )

    @property
    def generation_batch_size(self) -> int:
        """Completions."""
        return self.per_device_train_batch_size * self.steps_per_generation

    @property
    def prompts_per_generation(self) -> int:
        return self.generation_batch_size // self.num_generations

    @property
    def completions_per_optimizer_step(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def optimizer_steps_per_generation(self) -> int:
        return self.num_iterations * self.steps_per_generation // self.gradient_accumulation_steps

    @property
    def max_completion_tokens(self) -> int:
        """Upper bound of the completion tokens of one generation batch."""
        return self.generation_batch_size * self.max_completion_length

    @property
    def completions_per_rollout_worker(self) -> int:
        """Of the busiest worker; the completions of a prompt stay together, so that it is prefilled once."""
        return math.ceil(self.prompts_per_generation / self.rollout_cores) * self.num_generations

    @property
    def total_cores(self) -> int:
        return LEARNER_CORES + self.rollout_cores + self.reference_cores

    @property
    def generations_per_epoch(self) -> int:
        """Whole generation batches in one pass over the data, at least 1 (TRL leaves an incomplete one out)."""
        assert self.num_prompts is not None, "the data is read"
        return max(1, self.num_prompts // self.prompts_per_generation)

    @property
    def max_steps(self) -> int:
        """Optimizer steps of the run: train.max_steps, or what num_train_epochs come to; -1 before the data is read."""
        if self.given_max_steps > 0 or self.num_prompts is None:
            return self.given_max_steps
        return math.ceil(self.num_train_epochs * self.generations_per_epoch * self.optimizer_steps_per_generation)

    @property
    def num_generation_batches(self) -> int:
        """Generation batches of the run; the last one may be used in part."""
        return math.ceil(self.max_steps / self.optimizer_steps_per_generation)

    def describe(self) -> str:
        """The numbers with the names that TRL and verl have for them, for --dry-run."""
        rows: list[tuple[str, str, str]] = [
            ("prompts per generation batch", f"{self.prompts_per_generation}", "verl: train_batch_size"),
            ("completions per prompt", f"{self.num_generations}", "TRL: num_generations; verl: rollout.n"),
            (
                "completions per generation batch",
                f"{self.prompts_per_generation} x {self.num_generations} = {self.generation_batch_size}",
                "TRL: generation_batch_size",
            ),
            (
                "micro steps per generation batch",
                f"{self.steps_per_generation} of {self.per_device_train_batch_size} completions",
                "TRL: steps_per_generation, per_device_train_batch_size",
            ),
            (
                "completions per optimizer step",
                f"{self.per_device_train_batch_size} x {self.gradient_accumulation_steps} = "
                f"{self.completions_per_optimizer_step}",
                "verl: ppo_mini_batch_size x rollout.n",
            ),
            (
                "optimizer steps per generation batch",
                f"{self.num_iterations} x {self.steps_per_generation} / {self.gradient_accumulation_steps} = "
                f"{self.optimizer_steps_per_generation}",
                "TRL: num_iterations; verl: ppo_epochs",
            ),
            ("completion tokens, at most", f"{self.max_completion_tokens}", "x max_completion_length"),
            ("completions per rollout worker", f"{self.completions_per_rollout_worker}", "the busiest"),
            (
                "cores",
                f"{LEARNER_CORES} learner + {self.rollout_cores} rollout + {self.reference_cores} reference = "
                f"{self.total_cores}",
                "",
            ),
        ]
        if self.num_prompts is not None:
            epochs = self.num_generation_batches * self.prompts_per_generation / self.num_prompts
            rows.append(("training prompts", f"{self.num_prompts}", f"{epochs:.2f} epochs"))
        if self.max_steps > 0:
            rows.append(("optimizer steps of the run", f"{self.max_steps}", "TRL: max_steps"))
        width = max(len(name) for name, _, _ in rows)
        middle = max(len(value) for _, value, _ in rows)
        return "\n".join(f"{name:<{width}}  {value:<{middle}}  {note}".rstrip() for name, value, note in rows)


def steps_per_generation(train: TrainSection) -> int:
    """Micro steps per generation batch, by TRL's rule; rounds down where `batch_problems` has a complaint."""
    if train.generation_batch_size is not None:
        return max(1, train.generation_batch_size // train.per_device_train_batch_size)
    return train.steps_per_generation or train.gradient_accumulation_steps


def batch_problems(rollout: RolloutSection, train: TrainSection) -> list[Problem]:
    """Batch sizes that do not divide, with the product and values that would do. Empty if all is well."""
    size, batch = train.per_device_train_batch_size, train.generation_batch_size
    group, accumulation = rollout.num_generations, train.gradient_accumulation_steps
    if batch is not None and train.steps_per_generation is not None:
        text = "steps_per_generation is given too; one follows from the other, remove one of the two"
        return [Problem(("train", "generation_batch_size"), text)]
    if batch is not None and (batch % (size * accumulation) or batch % group):
        unit = math.lcm(size * accumulation, group)
        text = (
            f"{batch} completions; they must be divisible by per_device_train_batch_size {size} x "
            f"gradient_accumulation_steps {accumulation} = {size * accumulation} and by num_generations {group}; "
            f"write {_nearest_multiples(batch, unit)}"
        )
        return [Problem(("train", "generation_batch_size"), text)]
    steps = steps_per_generation(train)
    if steps % accumulation:
        text = (
            f"{steps} micro steps per generation batch are not divisible by gradient_accumulation_steps "
            f"{accumulation}; write {_nearest_multiples(steps, accumulation)}"
        )
        return [Problem(("train", "steps_per_generation"), text)]
    product = size * steps
    if product % group:
        unit = group // math.gcd(group, steps)
        groups = [value for value in range(2, product + 1) if product % value == 0]
        either = f" or rollout.num_generations {_listed(groups)}" if groups else ""
        text = (
            f"{size} x {_steps_name(train)} {steps} = {product} completions per generation batch, not divisible by "
            f"num_generations {group}; write {_nearest_multiples(size, unit)}{either}"
        )
        return [Problem(("train", "per_device_train_batch_size"), text)]
    return []


def _steps_name(train: TrainSection) -> str:
    return "gradient_accumulation_steps" if train.steps_per_generation is None else "steps_per_generation"


def _nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` around `value`, at least one."""
    below, above = value // unit * unit, (value // unit + 1) * unit
    return f"{below} or {above}" if below > 0 else f"{above}"


def _listed(values: list[int]) -> str:
    shown = values if len(values) <= 8 else [*values[:7], values[-1]]
    return " or ".join([", ".join(map(str, shown[:-1])), str(shown[-1])]) if len(shown) > 1 else str(shown[0])
