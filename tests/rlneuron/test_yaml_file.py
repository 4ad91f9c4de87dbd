"""YAML 1.2 with positions: values, origins, aliases, and dumps that read back to equal values and types."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlneuron.yaml_file import YamlProblem, dump_yaml, read_assignment, read_yaml


def read(folder: Path, text: str) -> dict:
    (folder / "a.yaml").write_text(text)
    return read_yaml(folder / "a.yaml").values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E6", 1e6),
        ("5e-7", 5e-7),
        (".5", 0.5),
        ("-1.5e+3", -1500.0),
        ("010", 10),
        ("0o10", 8),
        ("0x10", 16),
        ("1_000", 1000),
        ("true", True),
        ("no", "no"),
        ("on", "on"),
        ("y", "y"),
        ("2020-01-01", "2020-01-01"),
        ("1:30", "1:30"),
        ("~", None),
        ("", None),
        ("'1e-6'", "1e-6"),
        ('"\\u00e9"', "\u00e9"),
        ("[1, [a], {b: null}]", [1, ["a"], {"b": None}]),
    ],
)
def test_scalars_are_those_of_yaml_1_2(tmp_path, text, value):
    got = read(tmp_path, f"x: {text}")["x"]
    assert got == value
    assert type(got) is type(value)


def test_origins_have_lines_and_columns(tmp_path):
    (tmp_path / "a.yaml").write_text("a:\n  b: 1\n  c: [x, {d: 2}]\n")
    document = read_yaml(tmp_path / "a.yaml")
    places = {path: origin.at_value().rsplit("/", 1)[-1] for path, origin in document.origins.items()}
    assert places[("a", "b")] == "a.yaml:2:6"
    assert places[("a", "c", 1, "d")] == "a.yaml:3:14"
    assert document.origins[("a", "b")].at_key().endswith("a.yaml:2:3")
    assert document.origin(("a", "b", "nothing", "here")) == document.origins[("a", "b")]


def test_aliases_and_merge_keys_unfold(tmp_path):
    assert read(tmp_path, "a: &x {k: 1, l: 2}\nb: {<<: *x, k: 3}\nc: *x\n") == {
        "a": {"k": 1, "l": 2},
        "b": {"k": 3, "l": 2},
        "c": {"k": 1, "l": 2},
    }


def test_a_bomb_of_aliases_is_refused(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    with pytest.raises(YamlProblem, match="more than 20000 values"):
        read(tmp_path, "\n".join(lines))


def test_an_alias_inside_itself_is_refused(tmp_path):
    with pytest.raises(YamlProblem, match="an alias that contains itself"):
        read(tmp_path, "a: &a [*a]")


def test_two_documents_are_refused(tmp_path):
    with pytest.raises(YamlProblem, match="3:1: a second document"):
        read(tmp_path, "a: 1\n---\nb: 2\n")


def test_binary_files_are_refused_in_one_sentence(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(YamlProblem, match="it is not UTF-8 text"):
        read_yaml(tmp_path / "a.yaml")
    with pytest.raises(YamlProblem, match="cannot be read: Is a directory"):
        read_yaml(tmp_path)


def test_assignments_follow_the_same_rules():
    assert read_assignment("train.learning_rate=1e-6").values == {"train": {"learning_rate": 1e-6}}
    assert read_assignment("data.system_prompt='a=b: c'").values == {"data": {"system_prompt": "a=b: c"}}
    assert read_assignment("reward.funcs=[a, b]").values == {"reward": {"funcs": ["a", "b"]}}
    assert read_assignment("model.path=./a=b").values == {"model": {"path": "./a=b"}}


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc_", min_size=1, max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True), _values, max_size=4))
def test_a_dump_reads_back_to_equal_values_and_types(tmp_path_factory, values):
    path = tmp_path_factory.getbasetemp() / "dump.yaml"
    path.write_text(dump_yaml(values), encoding="utf-8")
    again = read_yaml(path).values
    assert again == values
    assert repr(again) == repr(values)  # 1 and 1.0 and True are equal; they must stay what they are


def test_not_a_number_can_be_dumped(tmp_path):
    assert math.isnan(read(tmp_path, dump_yaml({"x": math.nan}))["x"])
