"""The quickstart's model: its tokenizer, its words, its warm start, its cache."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import reasoning_gym
import torch

from rlneuron import models, quickstart
from rlneuron.data import reasoning_gym_rows, split_by_hash
from rlneuron.prompts import held_out_key, render

TINY = dataclasses.replace(quickstart.RECIPE, num_steps=3, batch_size=8, num_lr_warmup_steps=1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rlneuron" / "quickstart"


# ---- tokenizer ----------------------------------------------------------------------------------------------------
def test_the_prompt_is_what_the_chat_template_makes_of_the_question() -> None:
    tokenizer = quickstart.build_tokenizer()
    item = reasoning_gym.create_dataset("spell_backward", size=1, seed=3, min_word_len=3, max_word_len=6)[0]
    word = item["metadata"]["word"]
    assert item["question"] == quickstart.INSTRUCTION + word
    row = reasoning_gym_rows("spell_backward", 1, 3, {"min_word_len": 3, "max_word_len": 6})[0]
    ids = quickstart.prompt_ids(tokenizer, word)
    assert ids == render(tokenizer, row)
    assert tokenizer.decode(ids) == f"<|user|>{(quickstart.INSTRUCTION + word).lower()}<|end|><|assistant|>"


def test_the_instruction_is_one_token_and_each_letter_another() -> None:
    tokenizer = quickstart.build_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(quickstart.prompt_ids(tokenizer, "Abc"))
    assert tokens == ["<|user|>", quickstart.INSTRUCTION.lower(), "a", "b", "c", "<|end|>", "<|assistant|>"]
    assert len(tokenizer) == 32


def test_letters_come_back_from_their_ids_and_special_tokens_can_be_left_out(tmp_path: Path) -> None:
    quickstart.build_tokenizer().save_pretrained(tmp_path)
    tokenizer = models.AutoTokenizer.from_pretrained(tmp_path)
    word = "abcdefghijklmnopqrstuvwxyz"
    ids = tokenizer.encode(f"{word}<|end|>")
    assert len(ids) == 27 and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids) == f"{word}<|end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == word
    assert tokenizer.chat_template == quickstart.TEMPLATE


def test_the_template_renders_a_whole_conversation_and_refuses_a_system_message() -> None:
    tokenizer = quickstart.build_tokenizer()
    turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "<|user|>ab<|end|><|assistant|>ba<|end|>"
    with pytest.raises(Exception, match="user and assistant only"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}], tokenize=False)


# ---- words --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("data_seed", [0, 1])
def test_held_out_warm_start_and_training_words_are_disjoint(data_seed: int) -> None:
    words = quickstart.word_split()
    gym = {"min_word_len": 3, "max_word_len": 6}
    split = split_by_hash(reasoning_gym_rows("spell_backward", 12000, data_seed, gym), 256, 0)
    held_out = {held_out_key(row.prompt) for row in split.eval}
    shown = {
        held_out_key([{"role": "user", "content": quickstart.INSTRUCTION + word}]) for word in words.train
    }  # casefolded, as the run's own split compares
    assert len(held_out) == 256 and len(shown) > 30_000
    assert not held_out & shown
    assert not held_out & {held_out_key(row.prompt) for row in split.train}
    assert not set(words.train) & set(words.reserved)
    assert len({held_out_key(row.prompt) for row in split.train}) > 9_700
    assert {row.columns["metadata"]["word"].lower() for row in split.eval} <= set(words.reserved)


def test_demonstrations_are_right_as_often_as_the_recipe_says() -> None:
    rng = random.Random(0)
    shown = [quickstart.demonstration("planet", rng) for _ in range(4000)]
    assert abs(shown.count("tenalp") / 4000 - 0.25) < 0.03
    assert abs(shown.count("planet") / 4000 - 0.75 * 0.6) < 0.03
    swapped = [word for word in shown if word not in ("tenalp", "planet")]
    assert {sum(a != b for a, b in zip(word, "tenalp", strict=True)) for word in swapped} == {2}


# ---- warm start ---------------------------------------------------------------------------------------------------
def test_a_short_warm_start_lowers_the_loss() -> None:
    torch.manual_seed(0)
    tokenizer = quickstart.build_tokenizer()
    model = quickstart.build_model(tokenizer)
    assert models.count_parameters(model) == 252_720
    recipe = dataclasses.replace(quickstart.RECIPE, num_steps=25, batch_size=16)
    losses = quickstart.warm_start(model, tokenizer, ["planet", "window", "house"], seed=0, recipe=recipe)
    assert len(losses) == 25
    assert losses[0] > 3.0  # ln 32 = 3.47
    assert losses[-1] < 2.2


def test_accuracy_counts_whole_answers_with_their_end() -> None:
    tokenizer = quickstart.build_tokenizer()
    model = quickstart.build_model(tokenizer)
    recipe = dataclasses.replace(quickstart.RECIPE, num_steps=60, batch_size=8, right_share=1.0, learning_rate=3e-3)
    torch.manual_seed(0)
    quickstart.warm_start(model, tokenizer, ["planet"], seed=0, recipe=recipe)
    assert quickstart.accuracy(model, tokenizer, ["planet", "cat"], greedy=True) == 0.5


# ---- cache --------------------------------------------------------------------------------------------------------
def test_the_model_is_made_once_per_seed_and_loads(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = quickstart.ensure(5, TINY)
    first = capsys.readouterr().out
    assert folder.parent == cache and "seed 5, 252,720 parameters, 3 supervised steps" in first
    assert sorted(path.name for path in cache.iterdir()) == [folder.name], "no staging folder is left"
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert quickstart.ensure(5, TINY) == folder
    assert "(cached): seed 5" in capsys.readouterr().out
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert quickstart.ensure(6, TINY) != folder
    loaded = models.load(str(folder), dtype=torch.float32)
    assert loaded.eos_token_ids == (1,) and loaded.tokenizer.chat_template == quickstart.TEMPLATE


def test_the_same_seed_gives_the_same_weights_and_leaves_the_callers_generator_alone(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    weights = []
    for name in ("a", "b"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache / name))
        weights.append((quickstart.ensure(0, TINY) / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert torch.equal(torch.get_rng_state(), before)


def test_an_interrupted_warm_start_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quickstart.PreTrainedTokenizerFast, "save_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quickstart.ensure(0, TINY)
    assert list(cache.iterdir()) == []


def test_of_two_that_make_it_at_once_the_first_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(source: object, target: Path) -> None:
        Path(target).mkdir()
        (Path(target) / "of_the_other").touch()
        raise OSError("not empty")

    monkeypatch.setattr(quickstart.os, "rename", taken)
    folder = quickstart.ensure(0, TINY)
    assert [path.name for path in folder.iterdir()] == ["of_the_other"]
    assert [path.name for path in cache.iterdir()] == [folder.name]
