"""The quickstart's model: a 0.25M-parameter Qwen3 with a tokenizer of its own, warm-started on first use and cached.

The task is reasoning-gym's spell_backward on words of 3 to 6 letters. The warm start shows mostly WRONG answers, so
that supervised training alone ends below 0.35 sampled accuracy whatever its length: what comes after is the reward's
doing. Does not train by reward; that is the run itself (examples/quickstart.yaml).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rlneuron.device.build import cache_root
from rlneuron.models import count_parameters, no_progress_bars
from rlneuron.prompts import held_out_key

INSTRUCTION = "Spell this word backward (example: sun -> nus): "
"""reasoning-gym's own words, one token here: 25 tokens of prompt would be spent on the same sentence every time."""

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('the quickstart model knows the roles user and assistant only') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]

# run_data.py holds out the prompts with the lowest hash under this seed, whatever the seed of the run.
_SPLIT_SEED = 0
_RESERVED = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The warm start. The cache folder is named by a hash of these values and the seed."""

    version: int = 1
    """Raised when the code below changes what it makes."""
    min_word_letters: int = 3
    max_word_letters: int = 6
    hidden_size: int = 96
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 24
    ffn_size: int = 192
    num_steps: int = 800
    """With 400, reward took one seed of three to 0.74 only; with 800 the worst of four came to 0.90."""
    batch_size: int = 64
    learning_rate: float = 1e-3
    num_lr_warmup_steps: int = 20
    right_share: float = 0.25
    """Share of demonstrations that are right: sampled accuracy ends near it, whatever the number of steps."""
    copied_share: float = 0.6
    """Of the wrong ones: the word as it stands; the others are reversed with two neighbouring letters swapped."""


RECIPE = Recipe()


def ensure(seed: int, recipe: Recipe = RECIPE) -> Path:
    """The model folder for `seed`, made now if it is not in the cache; prints seed and figures either way.

    The folder appears whole or not at all: it is written beside its place and renamed. Two processes that make it
    at the same time both succeed, and one result stays.
    """
    folder = model_folder(seed, recipe)
    if not folder.is_dir():
        print(f"quickstart model: warm start on mostly wrong answers, seed {seed}, once, about a minute", flush=True)
        figures = _make(folder, seed, recipe)
        print(f"quickstart model: {_sentence(figures)}", flush=True)
    else:
        figures = json.loads((folder / "warm_start.json").read_text())
        print(f"quickstart model (cached): {_sentence(figures)}", flush=True)
    print(f"quickstart model: {folder}", flush=True)
    return folder


def model_folder(seed: int, recipe: Recipe = RECIPE) -> Path:
    """Where the model for `seed` lies or will lie."""
    text = json.dumps({**asdict(recipe), "seed": seed}, sort_keys=True)
    return cache_root() / "quickstart" / hashlib.sha256(text.encode()).hexdigest()[:16]


def _sentence(figures: dict[str, float]) -> str:
    return (
        f"seed {figures['seed']:.0f}, {figures['parameters']:,.0f} parameters, {figures['steps']:.0f} supervised steps "
        f"in {figures['wall_s']:.0f} s, loss {figures['loss']:.3f}; of {figures['held_out']:.0f} held-out words right: "
        f"{figures['accuracy_sampled']:.3f} sampled, {figures['accuracy_greedy']:.3f} greedy"
    )


def _make(folder: Path, seed: int, recipe: Recipe) -> dict[str, float]:
    """Trains, measures, writes `folder`; returns the figures."""
    started_s = time.perf_counter()
    split = word_split(recipe)
    tokenizer = build_tokenizer()
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(tokenizer, recipe)
        losses = warm_start(model, tokenizer, split.train, seed=seed, recipe=recipe)
        held_out = split.reserved[:256]
        sampled = accuracy(model, tokenizer, held_out, greedy=False)
        greedy = accuracy(model, tokenizer, held_out, greedy=True)
    tail = losses[-20:]
    figures = {
        "seed": seed,
        "parameters": count_parameters(model),
        "steps": len(losses),
        "wall_s": time.perf_counter() - started_s,
        "loss": sum(tail) / len(tail),
        "held_out": len(held_out),
        "accuracy_sampled": sampled,
        "accuracy_greedy": greedy,
    }
    _write(folder, model, tokenizer, {"figures": figures, "recipe": asdict(recipe)})
    return figures


def _write(
    folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, record: dict[str, dict[str, float]]
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with no_progress_bars():
            model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        (staging / "warm_start.json").write_text(json.dumps(record["figures"], indent=2) + "\n")
        (staging / "recipe.json").write_text(json.dumps(record["recipe"], indent=2) + "\n")
        try:
            os.rename(staging, folder)
        except OSError:
            if not folder.is_dir():
                raise
            # Another process was first; its folder is as good as this one.
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread: the sums, and so the weights, are then the same on any number of cores; more is hardly faster."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- words --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class WordSplit:
    """Lower-case words. `train` and `reserved` share none."""

    train: list[str]
    """For demonstrations."""
    reserved: list[str]
    """Never shown; sorted by hash, so that a run's held-out prompts are among the first of them."""


def word_split(recipe: Recipe = RECIPE) -> WordSplit:
    """Words by the hash of their prompt: the lowest tenth is reserved.

    The run holds out the prompts of lowest hash among those it draws (`data.split_by_hash`). As long as these are
    fewer than about a tenth of its prompts, they all are reserved here, whatever the run's draw: the quickstart
    holds out 256 of about 10,000.
    """
    import reasoning_gym

    drawn = reasoning_gym.create_dataset(
        "spell_backward", size=1, seed=0, min_word_len=recipe.min_word_letters, max_word_len=recipe.max_word_letters
    )
    ranks = {word: _hash_rank(word) for word in {word.lower() for word in drawn.words}}
    in_order = sorted(ranks, key=ranks.__getitem__)
    return WordSplit(
        train=sorted(word for word in in_order if ranks[word] >= _RESERVED),
        reserved=[word for word in in_order if ranks[word] < _RESERVED],
    )


def _hash_rank(word: str) -> float:
    """Position of the word's prompt in the order of `split_by_hash`, 0 to 1."""
    key = held_out_key([{"role": "user", "content": INSTRUCTION + word}])
    digest = hashlib.sha256(f"{_SPLIT_SEED}:{key}".encode()).digest()
    return float(int.from_bytes(digest[:8], "big") / 2**64)


# ---- tokenizer and network ----------------------------------------------------------------------------------------
def build_tokenizer() -> PreTrainedTokenizerFast:
    """32 tokens: the instruction, 26 letters, four special ones, and one for everything else.

    Upper case is read as lower case; the task's scorer does not tell them apart either.
    """
    instruction = INSTRUCTION.lower()
    words = [*SPECIAL, "<|unknown|>", instruction, *"abcdefghijklmnopqrstuvwxyz"]
    core = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<|unknown|>"))
    core.normalizer = normalizers.Lowercase()
    escaped = "".join("\\" + c if c in "().:-> " else c for c in instruction)
    core.pre_tokenizer = pre_tokenizers.Split(Regex(escaped + r"|[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unknown|>",
        extra_special_tokens=["<|user|>", "<|assistant|>"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=64,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast, recipe: Recipe = RECIPE) -> Qwen3ForCausalLM:
    """A Qwen3 decoder with random weights (252,720 parameters), from the global generator."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        intermediate_size=recipe.ffn_size,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    return model


# ---- supervised warm start ----------------------------------------------------------------------------------------
def demonstration(word: str, rng: random.Random, recipe: Recipe = RECIPE) -> str:
    """An answer to show for `word`: right with `right_share`, else copied, else reversed with one swap."""
    if rng.random() < recipe.right_share:
        return word[::-1]
    if rng.random() < recipe.copied_share:
        return word
    letters = list(reversed(word))
    at = rng.randrange(len(letters) - 1)
    letters[at], letters[at + 1] = letters[at + 1], letters[at]
    return "".join(letters)


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    words: Sequence[str],
    *,
    seed: int,
    recipe: Recipe = RECIPE,
) -> list[float]:
    """Trains `model` in place on demonstrations; returns the loss of each step (mean over answer tokens, nats)."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    losses = []
    model.train()
    for step in range(recipe.num_steps):
        chosen = [rng.choice(words) for _ in range(recipe.batch_size)]
        answers = [tokenizer.encode(f"{demonstration(word, rng, recipe)}<|end|>") for word in chosen]
        loss = _answer_loss(model, [prompt_ids(tokenizer, word) for word in chosen], answers)
        optimizer.param_groups[0]["lr"] = recipe.learning_rate * min(1.0, (step + 1) / recipe.num_lr_warmup_steps)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if sys.stdout.isatty() and (step + 1) % 100 == 0:
            print(f"quickstart model: warm start step {step + 1}/{recipe.num_steps}, loss {losses[-1]:.3f}", flush=True)
    model.eval()
    return losses


def prompt_ids(tokenizer: PreTrainedTokenizerFast, word: str) -> list[int]:
    """The prompt as the run renders it: the question as a user message, through the chat template."""
    messages = [{"role": "user", "content": INSTRUCTION + word}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(str(text), add_special_tokens=False)["input_ids"]
    return ids


def _answer_loss(model: Qwen3ForCausalLM, prompts: list[list[int]], answers: list[list[int]]) -> Tensor:
    """Cross entropy of the answers' tokens, rows padded on the right (a causal network never looks there)."""
    length = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids_BT = torch.zeros(len(prompts), length, dtype=torch.long)
    labels_BT = torch.full((len(prompts), length), -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids_BT[row, :end] = torch.tensor(prompt + answer)
        labels_BT[row, len(prompt) : end] = torch.tensor(answer)
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    return nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())


@torch.no_grad()
def accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, words: Sequence[str], *, greedy: bool
) -> float:
    """Share of `words` whose one answer (temperature 1, or greedy) is the word reversed, then <|end|>."""
    prompts = [prompt_ids(tokenizer, word) for word in words]
    batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    longest = max(len(word) for word in words)
    settings = GenerationConfig(
        max_new_tokens=longest + 1,
        do_sample=not greedy,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    output_BT = model.generate(**batch, generation_config=settings)
    answers = output_BT[:, batch["input_ids"].shape[1] :].tolist()
    right = [tokenizer.encode(f"{word[::-1]}<|end|>") for word in words]
    return sum(a[: len(r)] == r for a, r in zip(answers, right, strict=True)) / len(words)
