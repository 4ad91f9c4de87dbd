"""Whole runs through Ray actors: what comes out, that it can be resumed, and how it fails."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlneuron import models
from rlneuron.config import load_config
from rlneuron.controller import Controller
from rlneuron.run import Run
from rlneuron.workers import split_evenly
from tests.rlneuron.tiny_run import metrics, write_config


def run(
    folder: Path, name: str, changes: dict[str, Any], address: str, controller: type[Controller] = Controller
) -> int:
    """A run in this process on the shared cluster; returns its exit code."""
    changes = {**changes, "ray": {"address": address, "dashboard": False}}
    config = load_config([write_config(folder, name, changes)])
    return Run(config, command="test", run_id=name, controller=controller).main()


@pytest.fixture(scope="module")
def whole(tiny: Path, ray_address: str) -> Path:
    """The run that most tests look at: neuron, two rollout workers, a reference, four steps."""
    assert run(tiny, "whole", {"algo": {"beta": 0.04}, "train": {"max_steps": 4}}, ray_address) == 0
    return tiny / "whole"


def test_metrics_have_trl_names_and_no_simulated_time(whole: Path) -> None:
    rows = metrics(whole)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    expected = {
        "loss", "grad_norm", "learning_rate", "entropy", "kl", "reward", "reward_std", "frac_reward_zero_std",
        "rewards/digits/mean", "completions/mean_length", "completions/clipped_ratio", "num_tokens", "epoch",
        "clip_ratio/region_mean", "sampling/sampling_logp_difference/max", "wall_step_s", "wall_generate_s",
        "wall_update_s", "wall_sync_s", "device/operators", "device/flops", "device/bytes",
    }  # fmt: skip
    assert expected <= set(rows[0])
    assert not [name for row in rows for name in row if name.startswith("sim_")]
    assert all(row["device/operators"] > 0 and row["device/flops"] > 0 for row in rows)


def test_the_engine_and_the_learner_agree_on_log_probabilities_after_every_sync(whole: Path) -> None:
    # Sampled log-probabilities come from the engine's weights, the learner's from its own: 1e-5 in fp32.
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-5 for row in metrics(whole))


def test_checkpoints_load_with_transformers(whole: Path) -> None:
    assert sorted(p.name for p in whole.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    model = AutoModelForCausalLM.from_pretrained(whole / "checkpoint-4")
    assert model.config._attn_implementation in ("sdpa", "eager")
    assert AutoTokenizer.from_pretrained(whole / "checkpoint-4").eos_token == "<|end|>"
    start = AutoModelForCausalLM.from_pretrained(whole.parent / "model")
    moved = [(a - b).abs().max().item() for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert min(moved) > 0


def test_completions_are_written_row_by_row(whole: Path) -> None:
    table = pd.read_parquet(whole / "completions" / "completions_00003.parquet")
    assert len(table) == 16 and set(table.step) == {3}
    share = [sum(ch.isdigit() for ch in text) / max(len(text), 1) for text in table.completion]
    assert table.digits.tolist() == pytest.approx(share)  # each row has the reward of its own completion
    assert set(table.weight_version) == {2}
    groups = table.groupby(table.index // 4)
    advantage = (table.digits - groups.digits.transform("mean")) / (groups.digits.transform("std") + 1e-4)
    assert table.advantage.tolist() == pytest.approx(advantage.tolist(), abs=1e-4)


def test_cpu_and_neuron_give_equal_losses(tiny: Path, ray_address: str, whole: Path) -> None:
    changes = {"algo": {"beta": 0.04}, "train": {"max_steps": 4}, "device": {"type": "cpu"}}
    assert run(tiny, "on-cpu", changes, ray_address) == 0
    for a, b in zip(metrics(tiny / "on-cpu"), metrics(whole), strict=True):
        for name in ("loss", "grad_norm", "reward", "kl", "entropy", "num_tokens"):
            assert a[name] == pytest.approx(b[name], abs=1e-6, rel=1e-5), (a["step"], name)
        assert a["device/operators"] == 0


def test_a_resumed_run_equals_the_uninterrupted_one(tiny: Path, ray_address: str, whole: Path) -> None:
    first = {"algo": {"beta": 0.04}, "train": {"max_steps": 2}, "rollout": {"num_workers": 1}}
    assert run(tiny, "resumed", first, ray_address) == 0
    second = {"algo": {"beta": 0.04}, "train": {"max_steps": 4, "resume": "auto"}}
    assert run(tiny, "resumed", second, ray_address) == 0
    measured = ("wall_", "device/", "rollout/")
    for a, b in zip(metrics(tiny / "resumed"), metrics(whole), strict=True):
        names = [n for n in b if not n.startswith(measured) and not n.startswith("eval_")]
        assert {n: a[n] for n in names} == pytest.approx({n: b[n] for n in names}, abs=1e-6, rel=1e-5, nan_ok=True)
    a = AutoModelForCausalLM.from_pretrained(tiny / "resumed" / "checkpoint-4").state_dict()
    b = AutoModelForCausalLM.from_pretrained(whole / "checkpoint-4").state_dict()
    assert max((a[name] - b[name]).abs().max().item() for name in a) < 1e-6


def test_a_second_run_does_not_overwrite_the_first(tiny: Path, ray_address: str, whole: Path) -> None:
    before = (whole / "metrics.jsonl").read_text()
    assert run(tiny, "whole", {"train": {"max_steps": 1}}, ray_address) == 0
    assert (whole / "metrics.jsonl").read_text() == before
    assert len(metrics(tiny / "whole-2")) == 1


@pytest.mark.parametrize(
    ("function", "text"),
    [("raises_on_three", "RuntimeError"), ("kills_itself", "reward-0")],
)
def test_a_bad_reward_ends_the_run_before_any_weight_changes(
    tiny: Path, ray_address: str, capfd: pytest.CaptureFixture[str], function: str, text: str
) -> None:
    changes = {"reward": {"funcs": [f"{tiny / 'rewards.py'}:{function}"]}}
    assert run(tiny, f"bad-{function}", changes, ray_address) == 1
    message = capfd.readouterr().err
    assert text.lower() in message.lower() and (function in message or "reward-0" in message), message
    assert (tiny / f"bad-{function}" / "metrics.jsonl").read_text() == ""
    assert not list((tiny / f"bad-{function}").glob("checkpoint-*"))


def test_a_dead_rollout_worker_ends_the_run_with_its_name_and_log(
    tiny: Path, ray_address: str, capfd: pytest.CaptureFixture[str]
) -> None:
    class Murderous(Controller):
        def run_step(self) -> None:
            if self.step == 1:
                victim = next(owner for owner in self.workers.owners if owner.name == "rollout-1")
                os.kill(victim.pid, signal.SIGKILL)
            super().run_step()

    assert run(tiny, "murder", {}, ray_address, Murderous) == 1
    message = capfd.readouterr().err
    assert "rollout-1" in message and "died" in message and "log:" in message, message


def test_more_cores_than_there_are_is_refused_with_both_numbers(
    tiny: Path, ray_address: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tiny, "greedy", {"rollout": {"num_workers": 4}}, ray_address) == 2
    message = capfd.readouterr().err
    assert "needs 5 neuron_cores" in message and "has 4" in message, message


def test_too_little_device_memory_is_refused_with_both_numbers(
    tiny: Path, ray_address: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tiny, "small", {"device": {"hbm_gib": 0.0001}}, ray_address) == 2
    message = capfd.readouterr().err
    assert "learner needs at least" in message and "has 0.0001 GiB" in message, message


@pytest.mark.parametrize(
    ("section", "settings", "words"),
    [
        ("reward", {"funcs": ["math_verify"]}, "reward.funcs: 'math_verify' needs the column 'solution'"),
        ("reward", {"funcs": ["json:digits"]}, "reward.funcs: json has no function 'digits'"),
        ("data", {"prompt_column": "promt"}, "data.prompt_column: "),
    ],
)
def test_data_and_rewards_that_do_not_fit_are_refused_before_a_model_is_touched(
    tiny: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    section: str,
    settings: dict[str, Any],
    words: str,
) -> None:
    def touched(*_: object, **__: object) -> None:
        raise AssertionError("a tokenizer was loaded")

    monkeypatch.setattr(models, "load_tokenizer", touched)
    config = load_config([write_config(tiny, "unfit", {section: settings})])
    assert Run(config, command="test", run_id="unfit").main() == 2
    message = capfd.readouterr().err
    assert f"{tiny / 'unfit.yaml'}:1:" in message and words in message, message
    assert not (tiny / "unfit").exists()


def start_process(config: Path) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "rlneuron.train", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def test_ctrl_c_writes_a_checkpoint_and_leaves_nothing_running(tiny: Path) -> None:
    changes = {"train": {"max_steps": 500, "save_steps": 500}, "reward": {"funcs": [f"{tiny / 'rewards.py'}:slow"]}}
    process = start_process(write_config(tiny, "stopped", {**changes, "ray": {"dashboard": True}}))
    assert process.stdout is not None
    lines: list[str] = []
    children: list[psutil.Process] = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step 2/"):
            children = psutil.Process(process.pid).children(recursive=True)
            os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=120) == 130, "".join(lines)
    text = "".join(lines)
    folder = tiny / "stopped"
    token_file = folder / "ray_token"
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    assert token_file.read_text() not in text and str(token_file) in text
    assert "http://127.0.0.1:" in text and "SIMULATED" in text
    last = metrics(folder)[-1]["step"]
    assert (folder / f"checkpoint-{last}" / "model.safetensors").exists()
    assert len(children) > 5
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


@pytest.mark.parametrize(("count", "parts"), [(16, 2), (5, 2), (1, 3), (7, 3)])
def test_prompts_are_split_evenly_and_completely(count: int, parts: int) -> None:
    ranges = split_evenly(count, parts)
    assert [i for part in ranges for i in part] == list(range(count))
    sizes = [len(part) for part in ranges]
    assert max(sizes) - min(sizes) <= 1


def test_the_eval_metrics_use_one_completion_per_prompt(whole: Path) -> None:
    last = metrics(whole)[-1]
    assert 0 <= last["eval_reward"] <= 1 and 0 <= last["eval_reward_greedy"] <= 1
    assert torch.isfinite(torch.tensor(last["wall_eval_s"]))
