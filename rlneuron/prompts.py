"""One prompt: what it is, how it is told apart from others, how it becomes token ids.

Does not read files (data.py does) and does not hold a tokenizer. A prompt is either plain text or a conversation
(a list of messages); the chat template is applied here and nowhere else, so that learner, engine and evaluation
see the same ids.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Message = dict[str, Any]
Prompt = str | list[Message]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """One row of a data set.

    Example: `PromptRow(prompt=[{"role": "user", "content": "1 + 1 ="}], columns={"answer": "2"}, uid="9f3c...")`
    """

    prompt: Prompt
    """Plain text, or messages {role, content, ...} of a conversation."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every other column; reward functions get them by name."""
    uid: str
    """Names the row for ever: the hash of its prompt, with "-2", "-3", ... for repeated prompts."""

    @property
    def is_conversational(self) -> bool:
        return not isinstance(self.prompt, str)


def prompt_hash(prompt: Prompt) -> str:
    """32 hex digits of the SHA-256 of the prompt as written."""
    text = json.dumps(prompt, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def held_out_key(prompt: Prompt) -> str:
    """The hash by which training and held-out prompts are kept apart.

    Case and white space do not count: "Spell: Sun" in training would give away "spell:  sun" in the held-out part.
    """
    texts = [prompt] if isinstance(prompt, str) else [f"{m.get('role')}: {m.get('content')}" for m in prompt]
    return prompt_hash(" | ".join(" ".join(text.split()).casefold() for text in texts))


def with_uids(prompts: Sequence[tuple[Prompt, Mapping[str, Any]]]) -> list[PromptRow]:
    """Rows of (prompt, columns) pairs; the n-th repetition of a prompt gets the suffix "-n"."""
    seen: dict[str, int] = {}
    rows = []
    for prompt, columns in prompts:
        key = prompt_hash(prompt)
        seen[key] = seen.get(key, 0) + 1
        uid = key if seen[key] == 1 else f"{key}-{seen[key]}"
        rows.append(PromptRow(prompt=prompt, columns=columns, uid=uid))
    return rows


# ---- rendering ----------------------------------------------------------------------------------------------------
class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that rendering needs."""

    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: Any

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Any: ...

    def apply_chat_template(self, conversation: list[Message], **kwargs: Any) -> Any: ...


def render(
    tokenizer: Tokenizer,
    row: PromptRow,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
) -> list[int]:
    """Token ids of a prompt, ready for generation, with at most one BOS.

    A conversation goes through the tokenizer's chat template, which alone decides about BOS (the tokenizer adds
    nothing to it); plain text gets what the tokenizer adds. `system_prompt` is put before a conversation that has no
    system message of its own. ValueError if there is no chat template or the last message is not user, tool or
    assistant (an assistant message is continued, as in TRL).
    """
    if isinstance(row.prompt, str):
        if system_prompt is not None:
            raise ValueError(
                f"data.system_prompt is set but the prompt {shorten(row.prompt)} is plain text; write "
                "data.conversational: true to turn plain prompts into user messages"
            )
        return _plain_ids(tokenizer, row.prompt)
    messages = clean_messages(row.prompt)
    if system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if not tokenizer.chat_template:
        raise ValueError(
            "the prompts are conversations but the model's tokenizer has no chat template; use a model with one, or "
            "plain text prompts (data.conversational: false)"
        )
    last_role = messages[-1]["role"]
    if last_role not in ("user", "tool", "assistant"):
        raise ValueError(f"the last message of a prompt has role {last_role!r}; allowed: user, tool, assistant")
    text = tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=last_role != "assistant",
        continue_final_message=last_role == "assistant",
        **dict(chat_template_kwargs or {}),
    )
    return _one_bos(tokenizer, list(tokenizer(text, add_special_tokens=False)["input_ids"]))


def clean_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages without the None fields that table formats fill in, with tool-call arguments as objects.

    Arrow tables give every message every key that any message has; a template would print those as "None".
    """
    cleaned = [_without_none(message) for message in messages]
    for message in cleaned:
        for call in message.get("tool_calls", []):
            function = call.get("function", call)
            if isinstance(function.get("arguments"), str):
                function["arguments"] = _parsed_object(function["arguments"])
    return cleaned


def _parsed_object(text: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return _without_none(value) if isinstance(value, dict) else text


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value


def _plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids = list(tokenizer(text)["input_ids"])
    bare = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    eos = tokenizer.eos_token_id
    # Some tokenizers close every text with EOS; a prompt that is to be continued must not be closed.
    if eos is not None and len(ids) > 1 and ids[-1] == eos and (not bare or bare[-1] != eos):
        ids.pop()
    return _one_bos(tokenizer, ids)


def _one_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    bos = tokenizer.bos_token_id
    while bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos:
        ids.pop(0)
    return ids


def shorten(value: Any, limit: int = 60) -> str:
    """repr of a value for an error message, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


# ---- prompts over the limit ---------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class FittedPrompts:
    """Prompts that fit, in their old order."""

    rows: list[PromptRow]
    token_ids: list[list[int]]
    num_overlong: int
    """How many were dropped (filter) or cut (truncate)."""


def fit_prompts(
    rows: Sequence[PromptRow],
    token_ids: Sequence[list[int]],
    max_prompt_length: int,
    overlong_prompts: Literal["error", "filter", "truncate"],
) -> FittedPrompts:
    """Applies one policy to prompts of more than `max_prompt_length` tokens, whether plain or conversational.

    error: ValueError naming the first; filter: dropped and counted; truncate: the last `max_prompt_length` tokens are
    kept (the end of a prompt holds the question). ValueError also if nothing is left, or a prompt has no tokens.
    """
    assert len(rows) == len(token_ids), "one id list per row"
    for row, ids in zip(rows, token_ids, strict=True):
        if not ids:
            raise ValueError(f"the prompt {shorten(row.prompt)} has no tokens; remove the row")
    overlong = [index for index, ids in enumerate(token_ids) if len(ids) > max_prompt_length]
    if overlong and overlong_prompts == "error":
        first = overlong[0]
        raise ValueError(
            f"{len(overlong)} of {len(rows)} prompts are longer than {max_prompt_length} tokens (the first, row "
            f"{first}, has {len(token_ids[first])}: {shorten(rows[first].prompt)}); raise data.max_prompt_length or "
            "write data.overlong_prompts: filter, or truncate"
        )
    if overlong_prompts == "truncate":
        cut = [ids[-max_prompt_length:] for ids in token_ids]
        return FittedPrompts(rows=list(rows), token_ids=cut, num_overlong=len(overlong))
    dropped = set(overlong)
    kept = [index for index in range(len(rows)) if index not in dropped]
    if rows and not kept:
        raise ValueError(
            f"all {len(rows)} prompts are longer than {max_prompt_length} tokens, so none is left to train on; raise "
            "data.max_prompt_length"
        )
    return FittedPrompts(
        rows=[rows[i] for i in kept], token_ids=[token_ids[i] for i in kept], num_overlong=len(overlong)
    )
