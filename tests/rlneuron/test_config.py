"""Run files: what is accepted, how files and assignments combine, and the exact sentence for each mistake."""

# ruff: noqa: E501 - golden texts are not wrapped

from pathlib import Path

import pytest
from pydantic import ValidationError

from rlneuron.config import ConfigError, RunConfig, deviations, key_table, load_config
from rlneuron.config_errors import describe
from rlneuron.config_names import NAMES_ELSEWHERE, TRL_NOT_HERE
from rlneuron.config_rules import warnings
from rlneuron.config_sections import DEVIATIONS, NOT_YET
from rlneuron.train import run_command

BASE = """\
model: {path: rlneuron/quickstart}
data:
  reasoning_gym: {task: chain_sum}
  eval: {size: 4}
reward: {funcs: [reasoning_gym]}
"""


def load(folder: Path, text: str = "", *assignments: str, base: str = BASE) -> RunConfig:
    """The base file, with `text` as an overlay (its line 1 is the first line of `text`)."""
    (folder / "base.yaml").write_text(base)
    (folder / "run.yaml").write_text(text)
    return load_config([folder / "base.yaml", folder / "run.yaml"], assignments)


def error(folder: Path, text: str = "", *assignments: str, base: str = BASE) -> str:
    """The error's text with the folder removed."""
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *assignments, base=base)
    return str(caught.value).replace(f"{folder}/", "")


# ---- what is accepted ---------------------------------------------------------------------------------------------
def test_numbers_follow_yaml_1_2(tmp_path):
    config = load(tmp_path, "train: {learning_rate: 1e-6, max_steps: 8.0, save_steps: 1e3, weight_decay: 1}")
    assert config.train.learning_rate == 1e-6
    assert (config.train.max_steps, type(config.train.max_steps)) == (8, int)
    assert (config.train.save_steps, type(config.train.save_steps)) == (1000, int)
    assert config.train.weight_decay == 1.0


def test_overlays_merge_left_to_right_and_assignments_come_last(tmp_path):
    text = "rollout: {temperature: 0.5}\ntrain:\n"
    config = load(tmp_path, text, "train.seed=3", "data.reasoning_gym.config={min_terms: 2}", "train.seed=4")
    assert config.rollout.temperature == 0.5
    assert config.train.seed == 4
    assert config.data.reasoning_gym.task == "chain_sum"
    assert config.data.reasoning_gym.config == {"min_terms": 2}


def test_an_overlay_replaces_lists_as_a_whole(tmp_path):
    config = load(tmp_path, "reward: {funcs: [last_number, {func: math_verify, name: maths}]}")
    assert [(f.func, f.name) for f in config.reward.funcs] == [("last_number", None), ("math_verify", "maths")]


def test_the_resolved_configuration_loads_to_itself(tmp_path):
    text = 'data: {system_prompt: "Answer: on\\n\\"1e-6\\" no"}\ntrain: {adam_epsilon: 1e-12, max_grad_norm: 1}\n'
    config = load(tmp_path, text, "reward.reward_weights=[0.5]", "data.chat_template_kwargs={a: 'yes', b: [1, 2.0]}")
    (tmp_path / "resolved.yaml").write_text(config.to_yaml())
    assert load_config([tmp_path / "resolved.yaml"]) == config
    assert "adam_epsilon: 1e-12\n" in config.to_yaml()
    assert "max_grad_norm: 1.0\n" in config.to_yaml()


def test_a_loaded_configuration_does_not_change(tmp_path):
    with pytest.raises(ValidationError):
        load(tmp_path).train.seed = 1


def test_environment_variables_do_not_configure(tmp_path, monkeypatch):
    for name in ("SEED", "TRAIN_SEED", "RLNEURON_TRAIN_SEED", "train.seed"):
        monkeypatch.setenv(name, "7")
    assert load(tmp_path).train.seed == 42


def test_relative_paths_are_looked_for_beside_the_file_then_in_the_working_directory(tmp_path, monkeypatch):
    files, elsewhere = tmp_path / "files", tmp_path / "cwd"
    files.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (files / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (files / "score.py").write_text("def f(completions, **kw): return [0.0] * len(completions)\n")
    (elsewhere / "more.py").write_text("def g(completions, **kw): return [0.0] * len(completions)\n")
    text = (
        "data: {reasoning_gym: null, path: prompts.jsonl, eval: {size: 1}}\nreward: {funcs: ['score.py:f', more.py:g]}"
    )
    config = load(files, text)
    assert config.data.path == str(files / "prompts.jsonl")
    assert [f.func for f in config.reward.funcs] == [f"{files}/score.py:f", f"{elsewhere}/more.py:g"]


def test_hub_ids_stay_as_they_are(tmp_path):
    config = load(tmp_path, "model: {path: org/some-model_1.5}\ndata: {reasoning_gym: null, path: org/set, name: main}")
    assert (config.model.path, config.data.path, config.data.name) == ("org/some-model_1.5", "org/set", "main")


# ---- golden sentences ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            'train:\n  learning_rate: "1e-6"\n',
            "run.yaml:2:18: train.learning_rate: the text '1e-6' is given; allowed: a number >= 0; "
            "write 1e-6 without quotes",
        ),
        (
            "train: {learning_rate: abc}",
            "run.yaml:1:24: train.learning_rate: the text 'abc' is given; allowed: a number >= 0",
        ),
        ("train:\n  max_steps: 8.5\n", "run.yaml:2:14: train.max_steps: 8.5 is given; allowed: a whole number >= -1"),
        ("train: {save_steps: .inf}", "run.yaml:1:21: train.save_steps: inf is given; allowed: a whole number >= 1"),
        ("train: {learning_rate: .nan}", "run.yaml:1:24: train.learning_rate: nan is given; allowed: a number >= 0"),
        ("train: {seed: true}", "run.yaml:1:15: train.seed: true is given; allowed: a whole number >= 0"),
        (
            "model: {trust_remote_code: no}",
            "run.yaml:1:28: model.trust_remote_code: the text 'no' is given; allowed: true or false; "
            "YAML 1.2 reads no as text, write false",
        ),
        (
            "train: {bf16: on}",
            "run.yaml:1:15: train.bf16: the text 'on' is given; allowed: true or false; "
            "YAML 1.2 reads on as text, write true",
        ),
        (
            'train: {bf16: "true"}',
            "run.yaml:1:15: train.bf16: the text 'true' is given; allowed: true or false; write true without quotes",
        ),
        ("train: {bf16: 1}", "run.yaml:1:15: train.bf16: 1 is given; allowed: true or false"),
        (
            "device: {simulate: 1}",
            "run.yaml:1:20: device.simulate: 1 is given; allowed: one of auto, true, false",
        ),
        (
            "algo: {scale_rewards: groups}",
            "run.yaml:1:23: algo.scale_rewards: the text 'groups' is given; allowed: one of group, batch, none; "
            "nearest: group",
        ),
        ("rollout: {num_generations: 1}", "run.yaml:1:28: rollout.num_generations: 1 is given; allowed: a whole number >= 2"),
        ("rollout: {top_p: 1.5}", "run.yaml:1:18: rollout.top_p: 1.5 is given; allowed: a number > 0 and <= 1"),
        (
            "reward: {funcs: []}",
            "run.yaml:1:17: reward.funcs: a list of 0 is given; allowed: a list with at least one item, each item "
            "a function's name, or a mapping with the keys func, name, args",
        ),
        ("device: cpu", "run.yaml:1:9: device: the text 'cpu' is given; allowed: a mapping with the keys type, instance, "
         "simulate, numerics, hbm_gib, price_per_hour, budget_usd, max_graphs, faults"),
        # unknown keys
        (
            "rollout:\n  num_generation: 8\n",
            "run.yaml:2:3: rollout.num_generation: unknown key; nearest: rollout.num_generations",
        ),
        ("train:\n  learning-rate: 1\n", "run.yaml:2:3: train.learning-rate: unknown key; write train.learning_rate"),
        ("algo: {learning_rate: 1}", "run.yaml:1:8: algo.learning_rate: unknown key here; write train.learning_rate"),
        ("learning_rate: 1", "run.yaml:1:1: learning_rate: unknown key here; write train.learning_rate"),
        ("rollout: {max_prompt_length: 4}", "run.yaml:1:11: rollout.max_prompt_length: unknown key here; write data.max_prompt_length"),
        ("algo: {num_generation: 8}", "run.yaml:1:8: algo.num_generation: unknown key; nearest: rollout.num_generations"),
        ("Train: {seed: 1}", "run.yaml:1:1: Train: unknown key; nearest: train"),
        ("algo: {lora_r: 8}", "run.yaml:1:8: algo.lora_r: unknown key; LoRA: it is not available yet"),
        (
            "rollout: {vllm_mode: colocate}",
            "run.yaml:1:11: rollout.vllm_mode: unknown key; generation is always by rlneuron's own engine; write "
            "rollout.num_workers for the number of its actors",
        ),
        (
            "train: {deepspeed: ds.json}",
            "run.yaml:1:9: train.deepspeed: unknown key; placement is by Ray (section ray) and the learner has one core; "
            "sharding: it is not available yet",
        ),
        (
            "data: {qqqqq: 1}",
            "run.yaml:1:8: data.qqqqq: unknown key; the keys here are path, name, split, reasoning_gym, prompt_column, "
            "conversational, system_prompt, chat_template_kwargs, shuffle_dataset, max_prompt_length, "
            "overlong_prompts, eval",
        ),
        # between keys
        (
            "train: {per_device_train_batch_size: 7}",
            "run.yaml:1:38: train.per_device_train_batch_size: 7 x gradient_accumulation_steps 1 = 7 completions per "
            "generation batch, not divisible by num_generations 8; write 8 or rollout.num_generations 7",
        ),
        (
            "rollout:\n  num_generations: 16\ntrain:\n  per_device_train_batch_size: 1\n",
            "run.yaml:4:32: train.per_device_train_batch_size: 1 x gradient_accumulation_steps 1 = 1 completions per "
            "generation batch, not divisible by num_generations 16; write 16",
        ),
        (
            "train: {generation_batch_size: 20}",
            "run.yaml:1:32: train.generation_batch_size: 20 completions; they must be divisible by "
            "per_device_train_batch_size 8 x gradient_accumulation_steps 1 = 8 and by num_generations 8; write 16 or 24",
        ),
        (
            "train: {gradient_accumulation_steps: 2, steps_per_generation: 3}",
            "run.yaml:1:63: train.steps_per_generation: 3 micro steps per generation batch are not divisible by "
            "gradient_accumulation_steps 2; write 2 or 4",
        ),
        (
            "train: {steps_per_generation: 2, generation_batch_size: 16}",
            "run.yaml:1:57: train.generation_batch_size: steps_per_generation is given too; one follows from the "
            "other, remove one of the two",
        ),
        ("reward: {reward_weights: [1, 2]}", "run.yaml:1:26: reward.reward_weights: 2 weights for 1 functions in "
         "reward.funcs; write one each"),
        ("data: {path: org/set}", "run.yaml:1:14: data.path: given together with data.reasoning_gym; keep one"),
        ("data: {eval: null}\ntrain: {eval_steps: 5}", "run.yaml:2:21: train.eval_steps: there are no held-out prompts; "
         "write data.eval.size or data.eval.path"),
        ("train: {max_steps: 0}", "run.yaml:1:20: train.max_steps: 0 is given; allowed: -1 (num_train_epochs decides) "
         "or >= 1"),
        ("train: {warmup_steps: 2.5}", "run.yaml:1:23: train.warmup_steps: 2.5 is given; allowed: a share below 1 or "
         "whole steps"),
        ("train: {warmup_steps: 3, lr_scheduler_type: constant}", "run.yaml:1:23: train.warmup_steps: 3 has no effect "
         "with lr_scheduler_type constant; write constant_with_warmup there"),
        ("rollout: {batch_invariant: true}", "run.yaml:1:28: rollout.batch_invariant: true is not available yet; "
         "write false"),
        ("algo: {loss_type: cispo}", "run.yaml:1:19: algo.loss_type: cispo is not available yet; write dapo or grpo or "
         "dr_grpo or bnpo"),
        ("train: {max_staleness: 2}", "run.yaml:1:24: train.max_staleness: 2 is not available yet; write 0"),
        # files
        ("model: {path: ./nowhere}", "run.yaml:1:15: model.path: the folder './nowhere' does not exist (looked in "
         "{folder} and {cwd}); write a folder or a hub id"),
        ("data: {reasoning_gym: null, path: p.jsonl}", "run.yaml:1:35: data.path: the file 'p.jsonl' does not exist "
         "(looked in {folder} and {cwd})"),
        ("train: {resume: maybe}", "run.yaml:1:17: train.resume: 'maybe' is not a checkpoint folder (looked in {folder} "
         "and {cwd}); allowed: never, auto, a folder"),
        ("reward: {funcs: ['no.py:f']}", "run.yaml:1:18: reward.funcs[0]: the file 'no.py' does not exist (looked in "
         "{folder} and {cwd})"),
        ("reward: {funcs: [{func: acuracy_reward}]}", "run.yaml:1:25: reward.funcs[0].func: 'acuracy_reward' is no "
         "built-in reward; allowed: accuracy_reward, reasoning_accuracy_reward, think_format_reward, reasoning_gym, "
         "reasoning_gym_exact, last_number, math_verify, get_soft_overlong_punishment, "
         "get_repetition_penalty_reward, module:function or path/to/file.py:function; nearest: accuracy_reward"),
        # the text itself
        ("train: {seed: 1}\ntrain: {seed: 2}\n", "run.yaml:2:1: the key train is given twice (first on line 1); remove one"),
        ("train:\n  seed: 1\n  seed: 2\n", "run.yaml:3:3: the key train.seed is given twice (first on line 2); remove one"),
        ("train: [1", "run.yaml:1:10: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("train:\n    seed: 1\n  bf16: true\n", "run.yaml:3:3: not valid YAML: expected <block end>, but found '<block "
         "mapping start>' (check the indentation of this line, with spaces only, and that texts with ': ' are quoted)"),
        ("- train\n", "run.yaml:1: a run file must be a mapping of sections"),
        ("train: !!python/object:os.system {}", "run.yaml:1:8: the tag tag:yaml.org,2002:python/object:os.system is not "
         "allowed; write a plain value"),
    ],
)  # fmt: skip
def test_golden_sentences(tmp_path, text, sentence):
    got = error(tmp_path, text)
    assert got == sentence.replace("{folder}", str(tmp_path)).replace("{cwd}", str(Path.cwd()))


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("train.learning_rate='1e-6'", "command line \"train.learning_rate='1e-6'\": train.learning_rate: the text '1e-6' "
         "is given; allowed: a number >= 0; write 1e-6 without quotes"),
        ("train.sed=1", "command line 'train.sed=1': train.sed: unknown key; nearest: train.seed"),
        ("train.seed", "command line 'train.seed': not an assignment; write section.key=value"),
        ("train.seed=", "command line 'train.seed=': no value; write train.seed=null to unset the key"),
        ("train.seed=[1", "command line 'train.seed=[1': not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("train.per_device_train_batch_size=7", "command line 'train.per_device_train_batch_size=7': "
         "train.per_device_train_batch_size: 7 x gradient_accumulation_steps 1 = 7 completions per generation batch, "
         "not divisible by num_generations 8; write 8 or rollout.num_generations 7"),
    ],
)  # fmt: skip
def test_golden_sentences_of_assignments(tmp_path, assignment, sentence):
    assert error(tmp_path, "", assignment) == sentence


def test_missing_sections_say_what_to_write(tmp_path):
    assert error(tmp_path, base="").splitlines() == [
        "run.yaml: model.path: missing; write text that is not empty",
        "run.yaml: data: missing; write data.path or data.reasoning_gym",
        "run.yaml: reward.funcs: missing; write a list with at least one item, each item a function's name, or a "
        "mapping with the keys func, name, args",
    ]


def test_all_mistakes_are_reported_at_once_in_the_order_of_the_file(tmp_path):
    lines = error(tmp_path, "rollout: {top_p: 2}\nalgo: {gamma: 1}\ntrain: {seed: x}\n").splitlines()
    assert [line.split(": ")[1] for line in lines] == ["rollout.top_p", "algo.gamma", "train.seed"]


def test_an_error_in_an_overlaid_value_names_the_file_that_wrote_it(tmp_path):
    assert error(tmp_path, "train: {seed: 1}", base=BASE + "train: {seed: -1, bf16: 3}\n").startswith(
        "base.yaml:6:25: "
    )


def test_a_missing_run_file_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"^.*nowhere\.yaml: no such file$"):
        load_config([tmp_path / "nowhere.yaml"])


def test_a_model_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    assert "is no model folder: it holds no config.json" in error(tmp_path, "model: {path: model}")


@pytest.mark.parametrize("ending", [".csv", ".txt"])
def test_a_data_file_of_another_kind_is_refused(tmp_path, ending):
    (tmp_path / f"rows{ending}").write_text("prompt\n")
    text = f"data: {{reasoning_gym: null, path: rows{ending}}}"
    assert f"has the ending '{ending}'; allowed: .jsonl, .parquet, a folder" in error(tmp_path, text)


# ---- TRL's names and defaults -------------------------------------------------------------------------------------
def trl_defaults() -> dict[str, object]:
    import dataclasses

    from trl import GRPOConfig

    return {field.name: field.default for field in dataclasses.fields(GRPOConfig)}


def our_defaults() -> dict[str, object]:
    from rlneuron.config import leaves

    return {
        key: field.default for section in RunConfig.model_fields.values() for key, field in leaves(section.annotation)
    }


def test_every_key_shared_with_trl_has_its_default_or_a_listed_reason():
    theirs, ours = trl_defaults(), our_defaults()
    shared = set(theirs) & set(ours)
    assert len(shared) > 45
    different = {key for key in shared if ours[key] != theirs[key]}
    # True == 1 in Python: a switch must not hide as a number.
    different |= {key for key in shared if isinstance(ours[key], bool) != isinstance(theirs[key], bool)}
    assert different == set(DEVIATIONS)
    assert {row[0]: (row[2], row[3]) for row in deviations()} == {k: (theirs[k], ours[k]) for k in DEVIATIONS}
    assert all(reason for *_, reason in deviations())


def test_every_other_name_of_trl_has_an_answer():
    assert set(TRL_NOT_HERE) == set(trl_defaults()) - {key.rsplit(".", 1)[-1] for key in our_defaults()}
    assert not set(NAMES_ELSEWHERE) & set(TRL_NOT_HERE)


def test_advice_names_only_keys_that_exist():
    import re

    known = {f"{section}.{key}" for key, section in key_table()} | {"data.eval.split", "data.eval.path"}
    for advice in [*TRL_NOT_HERE.values(), *NAMES_ELSEWHERE.values()]:
        for name in re.findall(
            r"\b(?:model|data|reward|rollout|algo|device|train|logging|ray)\.[a-z_.0-9]*[a-z_0-9]", advice
        ):
            assert name in known, advice


def test_the_key_table_has_every_key_once_and_its_meaning():
    table = key_table()
    assert ("learning_rate", "train") in table
    assert ("reasoning_gym.task", "data") in table
    assert ("funcs", "reward") in table
    assert len(table) == len(set(table))
    from rlneuron.config import leaves

    for section in RunConfig.model_fields.values():
        for key, field in leaves(section.annotation):
            assert field.description, key
            assert describe(field.annotation, tuple(field.metadata)), key


def test_values_that_are_not_built_are_declared_for_existing_keys():
    table = set(key_table())
    for (section, key), working in NOT_YET.items():
        assert (key, section) in table
        assert our_defaults()[key] in working


# ---- silent traps -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["algo.importance_sampling_level=sequence"], "GSPO as published is loss_type: grpo"),
        (["algo.loss_type=dr_grpo"], "Dr. GRPO as published is none"),
        (["rollout.top_k=-1"], "-1 means off here"),
        (["rollout.top_p=0.9"], "rollout samples with top_p 0.9"),
        (["rollout.num_generations=2"], "+-0.707"),
        (["train.learning_rate=0"], "nothing is learned"),
        (["algo.epsilon_high=0.1"], "is below epsilon 0.2"),
        (["train.max_steps=5", "train.warmup_steps=5"], "never gets up"),
        (["algo.beta=0.1"], "one more core"),
        (["device.type=cpu", "device.hbm_gib=4"], "device.hbm_gib has no effect"),
        (["algo.epsilon=0.3"], "the ratio is 1, so epsilon"),
        ([], "some have nothing to do"),
        ([], "nothing is evaluated"),
    ],
)
def test_silent_traps_are_named(tmp_path, assignments, words):
    assert any(words in warning for warning in warnings(load(tmp_path, "", *assignments)))


def test_a_dry_run_prints_the_configuration_the_arithmetic_and_the_warnings(capsys):
    quickstart = Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml"
    assert run_command([str(quickstart), "train.max_steps=10"], dry_run=True) == 0
    out, err = capsys.readouterr()
    assert "task: spell_backward" in out and "completions per optimizer step" in out
    assert err == "warning: train.warmup_steps 10 of 10 steps: the learning rate never gets up\n"


def test_a_plain_run_has_no_warnings(tmp_path):
    config = load(
        tmp_path, "", "train.eval_steps=5", "train.gradient_accumulation_steps=4", "train.steps_per_generation=8"
    )
    assert warnings(config) == []
