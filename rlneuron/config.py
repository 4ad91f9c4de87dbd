"""A run file becomes a checked, frozen `RunConfig`, or one sentence per mistake.

    config = load_config([Path("run.yaml"), Path("overlay.yaml")], ["train.learning_rate=1e-5"])

Overlays are merged left to right, assignments last. Nothing is loaded, imported or downloaded here; environment
variables are never read. The keys are in config_sections.py, the arithmetic between them in batch_arithmetic.py.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, PrivateAttr, ValidationError

from rlneuron.batch_arithmetic import BatchArithmetic
from rlneuron.config_errors import Problem, inner_section, sentence, validation_problems
from rlneuron.config_paths import resolve_paths
from rlneuron.config_rules import rule_problems
from rlneuron.config_sections import (
    DEVIATIONS,
    AlgoSection,
    DataSection,
    DeviceSection,
    LoggingSection,
    ModelSection,
    RaySection,
    RewardSection,
    RolloutSection,
    Section,
    TrainSection,
)
from rlneuron.yaml_file import Document, YamlProblem, dump_yaml, read_assignment, read_yaml


class ConfigError(ValueError):
    """What the user wrote cannot be run; str() is one sentence per mistake, each on its line."""


class RunConfig(Section):
    """Everything that a run is told. `RunConfig.model_validate(dict)` works too, for use without a file."""

    model: ModelSection
    data: DataSection
    reward: RewardSection
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    algo: AlgoSection = Field(default_factory=AlgoSection)
    device: DeviceSection = Field(default_factory=DeviceSection)
    train: TrainSection = Field(default_factory=TrainSection)
    logging: LoggingSection = Field(default_factory=LoggingSection)
    ray: RaySection = Field(default_factory=RaySection)
    _written: Document = PrivateAttr(default_factory=Document)
    """Where the keys were written; without values."""

    def with_place(self, message: str) -> str:
        """'run.yaml:7:10: data.path: ...' of a message that begins with a key, where that key was written."""
        origin = self._written.origin(tuple(message.partition(":")[0].split(".")))
        return message if origin is None else f"{origin.at_value()}: {message}"

    @property
    def batch(self) -> BatchArithmetic:
        """Numbers of prompts, completions and steps that follow from the keys."""
        return BatchArithmetic.from_config(self)

    def to_yaml(self) -> str:
        """The resolved configuration: every key with its value, loadable by `load_config`."""
        return dump_yaml(self.model_dump())


def load_config(files: Sequence[Path], assignments: Sequence[str] = ()) -> RunConfig:
    """Reads, merges and checks. ConfigError names every mistake with key, place, value and what to write."""
    try:
        document = Document()
        for path in files:
            document.overlay(read_yaml(Path(path)))
        for assignment in assignments:
            document.overlay(read_assignment(assignment))
    except YamlProblem as problem:
        raise ConfigError(str(problem)) from None
    # An empty section (all its lines commented out) means its defaults.
    for section in RunConfig.model_fields:
        if section in document.values and document.values[section] is None:
            document.values[section] = {}
    problems = resolve_paths(document)
    try:
        config = RunConfig.model_validate(document.values)
    except ValidationError as error:
        wrong = validation_problems(error, RunConfig)
        known = {problem.path for problem in wrong}
        _refuse([*wrong, *(problem for problem in problems if problem.path not in known)], document, files)
        raise AssertionError("a validation error has at least one problem") from error
    _refuse([*problems, *rule_problems(config)], document, files)
    config._written.origins.update(document.origins)
    return config


def _refuse(problems: Sequence[Problem], document: Document, files: Sequence[Path]) -> None:
    if problems:
        fallback = str(files[-1]) if files else "command line"
        ordered = sorted(problems, key=lambda problem: _place(problem, document))
        raise ConfigError("\n".join(sentence(problem, document, fallback) for problem in ordered))


def _place(problem: Problem, document: Document) -> tuple[str, int, int]:
    origin = document.origin(problem.path)
    return ("", 0, 0) if origin is None else (origin.source, origin.line, origin.column)


def key_table() -> list[tuple[str, str]]:
    """(key, section) of every key, in the order of the sections; nested keys are dotted."""
    table = []
    for section, field in RunConfig.model_fields.items():
        assert isinstance(field.annotation, type)
        table += [(key, section) for key, _ in leaves(field.annotation)]
    return table


def leaves(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, pydantic field) of every key of a section and of the sections inside it."""
    for name, field in section.model_fields.items():
        inner = inner_section(field.annotation)
        if inner is None or name == "funcs":
            yield prefix + name, field
        else:
            yield from leaves(inner, f"{prefix}{name}.")


def deviations() -> list[tuple[str, str, Any, Any, str]]:
    """(key, section, TRL's default, ours, reason) wherever a key of TRL's has another default here."""
    import dataclasses

    from trl import GRPOConfig  # 2.5 s: only the README's table and tests need it

    theirs = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    found = []
    for section, field in RunConfig.model_fields.items():
        assert isinstance(field.annotation, type)
        for key, leaf in leaves(field.annotation):
            if key in theirs and leaf.default != theirs[key]:
                found.append((key, section, theirs[key], leaf.default, DEVIATIONS.get(key, "")))
    return found
