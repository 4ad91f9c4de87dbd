"""Sources of prompts, the split that keeps held-out prompts out of training, and the order with its resume."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlneuron.data import (
    PromptStream,
    column_names,
    dataset_rows,
    file_rows,
    held_out_key,
    reasoning_gym_rows,
    record_rows,
    split_by_hash,
    without_held_out,
)
from rlneuron.prompts import PromptRow, with_uids


def rows(count: int) -> list[PromptRow]:
    return with_uids([(f"prompt {index}", {"answer": index}) for index in range(count)])


def names(chosen: list[PromptRow]) -> list[int]:
    return [row.columns["answer"] for row in chosen]


# ---- reasoning-gym ------------------------------------------------------------------------------------------------
SPELL = {"min_word_len": 3, "max_word_len": 6}


def test_the_quickstart_has_ten_thousand_distinct_prompts_and_held_out_words():
    split = split_by_hash(reasoning_gym_rows("spell_backward", 60_000, 0, SPELL), 256, 0)
    words = {row.columns["metadata"]["word"].lower() for row in split.train}
    held_out = {row.columns["metadata"]["word"].lower() for row in split.eval}
    assert len({row.uid for row in split.train}) == len(split.train) > 10_000
    assert len(held_out) == 256
    assert not words & held_out
    assert split.num_repeated == 0


def test_questions_are_verbatim_user_messages_and_keep_their_entry():
    row = reasoning_gym_rows("chain_sum", 3, 0)[0]
    assert row.prompt == [{"role": "user", "content": row.columns["question"]}]
    assert set(row.columns) == {"question", "answer", "metadata"}
    assert row.columns["metadata"]["source_dataset"] == "chain_sum"
    plain = reasoning_gym_rows("chain_sum", 3, 0, conversational=False)[0]
    assert plain.prompt == row.columns["question"]


def test_the_draw_is_deterministic():
    assert reasoning_gym_rows("chain_sum", 20, 5) == reasoning_gym_rows("chain_sum", 20, 5)


def test_two_seeds_are_not_two_disjoint_sets():
    # Why held-out prompts are split off by hash: item i of seed s is item 0 of seed s + i.
    first = {row.uid for row in reasoning_gym_rows("chain_sum", 20, 0)}
    second = {row.uid for row in reasoning_gym_rows("chain_sum", 20, 1)}
    assert len(first & second) == 19


@pytest.mark.parametrize(
    ("task", "config", "words"),
    [
        ("spell_backwards", {}, "'spell_backwards' is not a reasoning-gym task; nearest: spell_backward "),
        ("chain_sum", {"min_digit": 1}, "data.reasoning_gym.config.min_digit: the task chain_sum has no such setting"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "is refused by the task chain_sum: max_terms must be"),
    ],
)
def test_mistakes_in_a_task_are_one_sentence(task, config, words):
    with pytest.raises(ValueError, match="reasoning") as caught:
        reasoning_gym_rows(task, 3, 0, config)
    assert words in str(caught.value)


# ---- files --------------------------------------------------------------------------------------------------------
def test_jsonl_and_parquet_give_the_same_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    records = [{"prompt": "a\u2028b", "answer": "1", "level": 2}, {"prompt": "c", "answer": None, "level": 3}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "rows.parquet")
    from_jsonl = file_rows(tmp_path / "rows.jsonl")
    assert from_jsonl == file_rows(tmp_path / "rows.parquet")
    assert from_jsonl[0].prompt == "a\u2028b"
    assert [dict(row.columns) for row in from_jsonl] == [{"answer": "1", "level": 2}, {"answer": None, "level": 3}]
    assert column_names(from_jsonl) == ["answer", "level"]


def test_a_datasets_folder_is_read(tmp_path):
    import datasets

    table = datasets.Dataset.from_list([{"question": "a", "answer": "1"}])
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "set")
    found = dataset_rows(str(tmp_path / "set"), None, "train", "question", conversational=True)
    assert found[0].prompt == [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match="could not be loaded"):
        dataset_rows(str(tmp_path / "set"), None, "test", "question")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"question": "a", "id": 1}\n', "has no column 'prompt'; its columns: question, id"),
        ('{"promt": "a"}\n', "has no column 'prompt'; its columns: promt; nearest: promt"),
        ('{"prompt": "a"}\n{"prompt": \n', "rows.jsonl:2:12: not valid JSON"),
        ('{"prompt": "a"}\n[1]\n', "rows.jsonl:2: a line must be a JSON object"),
        ('{"prompt": "a"}\n{"prompt": null}\n', "rows.jsonl row 2: the prompt is None; allowed: text, or a list of"),
        ('{"prompt": ""}\n', "row 1: the prompt is ''"),
        ('{"prompt": []}\n', "row 1: the prompt is []"),
        ('{"prompt": [{"content": "x"}]}\n', "row 1: the message {'content': 'x'} has no role"),
        ('{"prompt": [{"role": "user"}]}\n', "row 1: the message {'role': 'user'} has no content"),
        ('{"prompt": [{"role": "user", "content": ["x"]}]}\n', "a message is ['x']; only text is supported"),
        ('{"prompt": "a", "completions": 1}\n', "has a column 'completions', which reward functions get from the run"),
        ("\n", "holds no rows"),
    ],
)  # fmt: skip
def test_mistakes_in_a_file_name_file_and_row(tmp_path, text, words):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"rows\.jsonl") as caught:
        file_rows(tmp_path / "rows.jsonl")
    assert words in str(caught.value)


def test_text_can_be_made_a_conversation_and_a_conversation_refused():
    record = [{"prompt": "a"}]
    assert record_rows(record, "prompt", source="s", conversational=True)[0].prompt == [
        {"role": "user", "content": "a"}
    ]
    with pytest.raises(ValueError, match=r"is a conversation but data\.conversational is false"):
        record_rows([{"prompt": [{"role": "user", "content": "a"}]}], "prompt", source="s", conversational=False)


def test_repeated_prompts_keep_names_of_their_own():
    repeated = with_uids([("a", {}), ("b", {}), ("a", {})])
    assert len({row.uid for row in repeated}) == 3
    assert repeated[2].uid == repeated[0].uid + "-2"


# ---- split --------------------------------------------------------------------------------------------------------
def test_the_split_is_disjoint_and_counts_what_it_drops():
    data = with_uids([("Sun", {}), ("moon", {}), ("sun ", {}), ("star", {}), ("SUN", {}), ("moon", {}), ("sky", {})])
    for seed in range(20):
        split = split_by_hash(data, 2, seed)
        held_out = {held_out_key(row.prompt) for row in split.eval}
        assert len(split.eval) == len(held_out) == 2
        assert not held_out & {held_out_key(row.prompt) for row in split.train}
        assert len(split.train) + len(split.eval) + split.num_dropped == len(data)


def test_the_split_does_not_depend_on_the_order_of_the_rows():
    data = rows(50)
    forward, backward = split_by_hash(data, 10, 3), split_by_hash(data[::-1], 10, 3)
    assert sorted(names(forward.eval)) == sorted(names(backward.eval))
    assert sorted(names(split_by_hash(data, 10, 4).eval)) != sorted(names(forward.eval))


def test_nothing_is_held_out_without_a_size():
    split = split_by_hash(rows(3), 0, 0)
    assert (len(split.train), split.eval, split.num_dropped) == (3, [], 0)
    assert split.describe() == "3 training prompts, 0 held out"


def test_holding_out_everything_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="3 prompts are to be held out but there are only 3 distinct prompts"):
        split_by_hash(rows(3), 3, 0)
    with pytest.raises(ValueError, match="no training prompt is left: all 3 rows"):
        without_held_out(rows(3), rows(3))


def test_held_out_rows_of_another_file_are_taken_out_of_training():
    split = without_held_out(rows(5), with_uids([("Prompt 3", {}), ("other", {})]))
    assert names(split.train) == [0, 1, 2, 4]
    assert split.num_dropped == 1
    assert split.describe() == (
        "4 training prompts, 2 held out; 1 training rows dropped because their prompt is held out"
    )


# ---- order --------------------------------------------------------------------------------------------------------
def test_an_epoch_serves_every_row_once_in_a_new_order():
    stream = PromptStream(rows(12), seed=1)
    epochs = [[n for _ in range(3) for n in names(stream.next_prompts(4))] for _ in range(3)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert stream.epoch == 3.0


def test_without_shuffling_rows_come_in_their_order_and_wrap_around():
    stream = PromptStream(rows(5), seed=1, shuffle=False)
    assert [names(stream.next_prompts(3)) for _ in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


def test_the_order_is_pinned():
    # A change here would change the meaning of every seed, and break the resume of runs under way.
    assert names(PromptStream(rows(8), seed=42).next_prompts(8)) == [4, 7, 6, 2, 0, 3, 5, 1]


def test_seeds_give_different_orders():
    assert names(PromptStream(rows(50), seed=1).next_prompts(50)) != names(
        PromptStream(rows(50), seed=2).next_prompts(50)
    )


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 3), st.booleans())
def test_no_batch_repeats_a_row_and_resume_continues_exactly(num_rows, counts, seed, shuffle):
    counts = [min(count, num_rows) for count in counts]
    whole = PromptStream(rows(num_rows), seed=seed, shuffle=shuffle)
    batches = [names(whole.next_prompts(count)) for count in counts]
    for batch in batches:
        assert len(set(batch)) == len(batch)
    served = [name for batch in batches for name in batch]
    # No row is served twice more often than another beyond the epoch under way.
    assert max(served.count(n) for n in range(num_rows)) - min(served.count(n) for n in range(num_rows)) <= 2
    for stop in range(len(counts)):
        first = PromptStream(rows(num_rows), seed=seed, shuffle=shuffle)
        for count in counts[:stop]:
            first.next_prompts(count)
        resumed = PromptStream(rows(num_rows), seed=seed, shuffle=shuffle)
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [names(resumed.next_prompts(count)) for count in counts[stop:]] == batches[stop:]
        assert resumed.epoch == whole.epoch


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (PromptStream(rows(4), seed=1), "num_rows was 5 and is now 4"),
        (PromptStream(rows(6)[1:], seed=1), "fingerprint was"),
        (PromptStream(rows(5), seed=2), "seed was 1 and is now 2"),
        (PromptStream(rows(5), seed=1, shuffle=False), "shuffle was True and is now False"),
    ],
)
def test_resume_with_other_data_is_refused(other, words):
    with pytest.raises(ValueError, match=words):
        other.load_state_dict(PromptStream(rows(5), seed=1).state_dict())


def test_fewer_prompts_than_a_batch_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="the data has 3 prompts but one batch needs 4 different ones"):
        PromptStream(rows(3), seed=0).next_prompts(4)
    with pytest.raises(ValueError, match="the data has 0 prompts"):
        PromptStream([], seed=0)
