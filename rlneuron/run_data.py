"""The prompts of a run: read from the configured source, split, rendered with the model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlneuron.config import DataSection, RunConfig
from rlneuron.data import (
    DataSplit,
    PromptStream,
    column_names,
    dataset_rows,
    file_rows,
    reasoning_gym_rows,
    split_by_hash,
    without_held_out,
)
from rlneuron.prompts import PromptRow, fit_prompts, render
from rlneuron.rewards import check_columns, load_rewards


@dataclass(slots=True)
class Prompts:
    """Training prompts in order, held-out prompts, and the token ids of both."""

    stream: PromptStream
    eval_rows: list[PromptRow]
    description: str
    _config: RunConfig
    _tokenizer: PreTrainedTokenizerBase
    _ids: dict[str, list[int]] = field(default_factory=dict)

    def token_ids(self, row: PromptRow) -> list[int]:
        """The rendered prompt: chat template applied, one BOS at most."""
        if row.uid not in self._ids:
            self._ids[row.uid] = _render(self._config, self._tokenizer, row)
        return self._ids[row.uid]


def fit(config: RunConfig, split: DataSplit, tokenizer: PreTrainedTokenizerBase) -> Prompts:
    """The prompts of `split` for a tokenizer.

    With `data.max_prompt_length` all are rendered now and too long ones dealt with; otherwise each is rendered when
    it is first used.
    """
    train, held_out, ids = split.train, split.eval, {}
    description = split.describe()
    limit = config.data.max_prompt_length
    if limit is not None:
        for part in (train, held_out):
            rendered = [_render(config, tokenizer, row) for row in part]
            fitted = fit_prompts(part, rendered, limit, config.data.overlong_prompts)
            ids.update({row.uid: tokens for row, tokens in zip(fitted.rows, fitted.token_ids, strict=True)})
            part[:] = fitted.rows
            if fitted.num_overlong:
                description += f"; {fitted.num_overlong} over {limit} tokens ({config.data.overlong_prompts})"
    seed = config.train.seed if config.train.data_seed is None else config.train.data_seed
    stream = PromptStream(train, seed=seed, shuffle=config.data.shuffle_dataset)
    return Prompts(stream, held_out, description, config, tokenizer, ids)


def _render(config: RunConfig, tokenizer: PreTrainedTokenizerBase, row: PromptRow) -> list[int]:
    return render(
        tokenizer,
        row,
        chat_template_kwargs=config.data.chat_template_kwargs,
        system_prompt=config.data.system_prompt,
    )


def read(config: RunConfig) -> DataSplit:
    """Reads and splits the configured data. ValueError if a reward function or a column that it needs is missing."""
    split = _split(config)
    check_columns(load_rewards(config.reward.funcs), column_names(split.train))
    return split


def _split(config: RunConfig) -> DataSplit:
    data = config.data
    rows = _rows(config)
    if data.eval is None:
        return split_by_hash(rows, 0, config.train.seed)
    if data.eval.path is not None:
        held_out = _source_rows(data, data.eval.path, data.eval.name, data.eval.split)
        return without_held_out(rows, held_out)
    # The split depends on the data alone, not on the run's seed: the same words are held out in every run.
    return split_by_hash(rows, data.eval.size, 0)


def _rows(config: RunConfig) -> Sequence[PromptRow]:
    data = config.data
    if data.reasoning_gym is not None:
        gym = data.reasoning_gym
        return reasoning_gym_rows(
            gym.task, gym.size, gym.seed, gym.config, conversational=data.conversational is not False
        )
    assert data.path is not None, "config.py allows no data section without a source"
    return _source_rows(data, data.path, data.name, data.split)


def _source_rows(data: DataSection, path: str, name: str | None, split: str) -> list[PromptRow]:
    if Path(path).suffix in {".jsonl", ".parquet"}:
        return file_rows(Path(path), data.prompt_column, conversational=data.conversational)
    return dataset_rows(path, name, split, data.prompt_column, conversational=data.conversational)
