"""Prompts: where they come from, which are held out, and in what order training sees them.

Sources: a reasoning-gym task, a local .jsonl or .parquet file, a `datasets` folder, or a data set on the Hugging Face
hub. Reads no model and no tokenizer; rendering is in prompts.py.
"""

import difflib
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlneuron.prompts import (
    FittedPrompts,
    Message,
    Prompt,
    PromptRow,
    fit_prompts,
    held_out_key,
    prompt_hash,
    render,
    shorten,
    with_uids,
)

__all__ = [
    "DataSplit",
    "FittedPrompts",
    "PromptRow",
    "PromptStream",
    "column_names",
    "dataset_rows",
    "file_rows",
    "fit_prompts",
    "held_out_key",
    "prompt_hash",
    "reasoning_gym_rows",
    "render",
    "split_by_hash",
    "without_held_out",
]

# A reward function gets these names from the run, so that no column may take them.
RESERVED_COLUMNS = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environments",
)


# ---- sources ------------------------------------------------------------------------------------------------------
def reasoning_gym_rows(
    task: str,
    size: int,
    seed: int,
    config: Mapping[str, Any] | None = None,
    *,
    conversational: bool = True,
) -> list[PromptRow]:
    """Distinct questions among `size` draws from a reasoning-gym task, each as one user message (or plain text).

    Columns: question, answer, metadata (what the task's own scorer needs). A task draws with replacement, so fewer
    than `size` rows may come back. Two seeds are NOT two disjoint sets: item i of seed s is item 0 of seed s + i;
    use `split_by_hash`. ValueError for an unknown task or setting, naming the nearest.
    """
    import reasoning_gym  # 0.8 s: only runs that use it pay for it
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, list(DATASETS), n=1, cutoff=0.0)[0]
        raise ValueError(
            f"data.reasoning_gym.task: {task!r} is not a reasoning-gym task; nearest: {near} ({len(DATASETS)} tasks)"
        )
    settings = dict(config or {})
    allowed = set(DATASETS[task][1].__dataclass_fields__) - {"size", "seed"}
    for name in settings:
        if name not in allowed:
            raise ValueError(
                f"data.reasoning_gym.config.{name}: the task {task} has no such setting; allowed: "
                f"{', '.join(sorted(allowed)) or 'none'}"
            )
    try:
        items = reasoning_gym.create_dataset(task, size=size, seed=seed, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"data.reasoning_gym.config: {settings} is refused by the task {task}: {error}") from error
    pairs: dict[str, tuple[Prompt, Mapping[str, Any]]] = {}
    for index in range(size):
        item = items[index]
        question: str = item["question"]
        prompt: Prompt = [{"role": "user", "content": question}] if conversational else question
        columns = {"question": question, "answer": item["answer"], "metadata": item["metadata"]}
        pairs.setdefault(question, (prompt, columns))
    return with_uids(list(pairs.values()))


def file_rows(path: Path, prompt_column: str = "prompt", *, conversational: bool | None = None) -> list[PromptRow]:
    """Rows of a local .jsonl or .parquet file. ValueError names file, row or line, and the columns there are."""
    if path.suffix == ".jsonl":
        records = _jsonl_records(path)
    elif path.suffix == ".parquet":
        import pyarrow.parquet

        records = list(pyarrow.parquet.read_table(path).to_pylist())
    else:
        raise ValueError(f"data.path: {path} has the ending {path.suffix!r}; allowed: .jsonl, .parquet, or a folder")
    return record_rows(records, prompt_column, source=str(path), conversational=conversational)


def dataset_rows(
    path: str, name: str | None, split: str, prompt_column: str = "prompt", *, conversational: bool | None = None
) -> list[PromptRow]:
    """Rows of a data set folder or of a data set on the hub, through `datasets`."""
    import datasets

    try:
        if (Path(path) / "dataset_info.json").is_file() or (Path(path) / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(path)
            table = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            table = datasets.load_dataset(path, name, split=split)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"data.path: {path!r} (name {name}, split {split}) could not be loaded: {reason}") from error
    return record_rows(table.to_list(), prompt_column, source=path, conversational=conversational)


def _jsonl_records(path: Path) -> list[dict[str, Any]]:
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}:{error.colno}: not valid JSON: {error.msg}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number}: a line must be a JSON object, got {shorten(record)}")
        records.append(record)
    return records


def record_rows(
    records: Sequence[Mapping[str, Any]], prompt_column: str, *, source: str, conversational: bool | None = None
) -> list[PromptRow]:
    """Rows of plain records. A prompt is text or a list of messages; `conversational` turns text into one user
    message (True), refuses messages (False) or leaves both as they are (None)."""
    columns = list(dict.fromkeys(name for record in records for name in record))
    if not records:
        raise ValueError(f"data.path: {source} holds no rows")
    if prompt_column not in columns:
        near = difflib.get_close_matches(prompt_column, columns, n=1)
        raise ValueError(
            f"data.prompt_column: {source} has no column {prompt_column!r}; its columns: {', '.join(columns)}"
            + (f"; nearest: {near[0]}" if near else "")
        )
    taken = [name for name in columns if name in RESERVED_COLUMNS and name != prompt_column]
    if taken:
        raise ValueError(f"data.path: {source} has a column {taken[0]!r}, which reward functions get from the run")
    pairs = []
    for number, record in enumerate(records, start=1):
        where = f"{source} row {number}"
        prompt = _checked_prompt(record.get(prompt_column), where, conversational)
        rest = {name: record.get(name) for name in columns if name != prompt_column}
        pairs.append((prompt, rest))
    return with_uids(pairs)


def _checked_prompt(value: Any, where: str, conversational: bool | None) -> Prompt:
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}] if conversational else value
    if isinstance(value, list) and value:
        if conversational is False:
            raise ValueError(f"{where}: the prompt is a conversation but data.conversational is false")
        return [_checked_message(message, where) for message in value]
    raise ValueError(f"{where}: the prompt is {shorten(value)}; allowed: text, or a list of {{role, content}} messages")


def _checked_message(value: Any, where: str) -> Message:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise ValueError(f"{where}: the message {shorten(value)} has no role; write {{role: user, content: ...}}")
    content = value.get("content")
    if content is not None and not isinstance(content, str):
        raise ValueError(f"{where}: the content of a message is {shorten(content)}; only text is supported")
    if content is None and not value.get("tool_calls"):
        raise ValueError(f"{where}: the message {shorten(value)} has no content")
    return dict(value)


def column_names(rows: Sequence[PromptRow]) -> list[str]:
    """The columns that reward functions will get, for `rewards.check_columns`."""
    return list(dict.fromkeys(name for row in rows for name in row.columns))


# ---- training and held-out rows -----------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class DataSplit:
    """Training rows and held-out rows that share no prompt (by `held_out_key`)."""

    train: list[PromptRow]
    eval: list[PromptRow]
    num_dropped: int
    """Training rows removed because their prompt is held out."""
    num_repeated: int
    """Training rows whose exact prompt occurs earlier in the training part; they are kept."""

    def describe(self) -> str:
        text = f"{len(self.train)} training prompts, {len(self.eval)} held out"
        if self.num_dropped:
            text += f"; {self.num_dropped} training rows dropped because their prompt is held out"
        if self.num_repeated:
            text += f"; {self.num_repeated} training rows repeat an earlier prompt"
        return text


def split_by_hash(rows: Sequence[PromptRow], num_eval: int, seed: int) -> DataSplit:
    """Holds out `num_eval` distinct prompts, chosen by hash and seed, whatever the order of the rows.

    Every other row with a held-out prompt (also in other case or spacing) is dropped from the training part.
    """
    first_row: dict[str, PromptRow] = {}
    for row in rows:
        first_row.setdefault(held_out_key(row.prompt), row)
    if num_eval > 0 and num_eval >= len(first_row):
        raise ValueError(
            f"data.eval.size: {num_eval} prompts are to be held out but there are only {len(first_row)} distinct "
            f"prompts; allowed: 0 to {len(first_row) - 1}"
        )
    ranked = sorted(first_row, key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest())
    return without_held_out(rows, [first_row[key] for key in ranked[:num_eval]])


def without_held_out(rows: Sequence[PromptRow], held_out: Sequence[PromptRow]) -> DataSplit:
    """Training rows that share no prompt with `held_out`, which is returned as the eval part."""
    held_out_keys = {held_out_key(row.prompt) for row in held_out}
    chosen = {id(row) for row in held_out}
    train = [row for row in rows if held_out_key(row.prompt) not in held_out_keys]
    num_chosen = sum(id(row) in chosen for row in rows)
    if not train:
        raise ValueError(f"no training prompt is left: all {len(rows)} rows of the data are held out for evaluation")
    return DataSplit(
        train=train,
        eval=list(held_out),
        num_dropped=len(rows) - len(train) - num_chosen,
        num_repeated=len(train) - len({prompt_hash(row.prompt) for row in train}),
    )


# ---- order --------------------------------------------------------------------------------------------------------
class PromptStream:
    """Endless prompts in a fixed order: one permutation per epoch, from (seed, epoch) alone.

    A batch may begin in one epoch and end in the next (nothing is left over), but never holds a row twice: a row
    that would repeat is served first in the next batch. More rows per batch than there are rows is refused.
    """

    def __init__(self, rows: Sequence[PromptRow], *, seed: int, shuffle: bool = True) -> None:
        if not rows:
            raise ValueError("the data has 0 prompts; at least one batch of prompts is needed")
        self.rows = list(rows)
        self.seed = seed
        self.shuffle = shuffle
        self.num_served = 0
        self._epoch = 0
        self._position = 0
        self._deferred: list[int] = []
        self._order = self._permutation(0)

    @property
    def epoch(self) -> float:
        """Passes over the data so far, with fraction (TRL's metric `epoch`)."""
        return self.num_served / len(self.rows)

    def next_prompts(self, count: int) -> list[PromptRow]:
        """The next `count` rows, all different. Advances the stream."""
        if not 1 <= count <= len(self.rows):
            raise ValueError(
                f"the data has {len(self.rows)} prompts but one batch needs {count} different ones; give more "
                "prompts, or make generation_batch_size / num_generations smaller"
            )
        chosen: list[int] = []
        waiting, self._deferred = self._deferred, []
        while len(chosen) < count:
            index = waiting.pop(0) if waiting else self._advance()
            if index in chosen:
                self._deferred.append(index)
            else:
                chosen.append(index)
        self._deferred = waiting + self._deferred
        self.num_served += count
        return [self.rows[index] for index in chosen]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able position; `load_state_dict` on the same data continues with the same rows."""
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "deferred": list(self._deferred),
            "num_served": self.num_served,
            "num_rows": len(self.rows),
            "fingerprint": self.fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken. ValueError if data, seed or shuffling differ from then."""
        now = self.state_dict()
        for name in ("num_rows", "fingerprint", "seed", "shuffle"):
            if state[name] != now[name]:
                raise ValueError(
                    f"the run cannot be resumed with the same data order: {name} was {state[name]!r} and is now "
                    f"{now[name]!r}; use the same data and seed, or write train.resume: never"
                )
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._deferred = [int(index) for index in state["deferred"]]
        self.num_served = int(state["num_served"])
        self._order = self._permutation(self._epoch)

    def fingerprint(self) -> str:
        """Hash of all row names in order."""
        return hashlib.sha256("\n".join(row.uid for row in self.rows).encode()).hexdigest()[:16]

    def _advance(self) -> int:
        if self._position == len(self._order):
            self._epoch += 1
            self._position = 0
            self._order = self._permutation(self._epoch)
        self._position += 1
        return self._order[self._position - 1]

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(len(self.rows)))
        if self.shuffle:
            # A text seed is hashed by SHA-512: the order is the same on every machine and Python.
            random.Random(f"{self.seed}:{epoch}").shuffle(order)
        return order
