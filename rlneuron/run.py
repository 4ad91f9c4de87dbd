"""One run from a checked configuration to its end: what train.py calls.

Builds, in order: device library, model, prompts, run folder, Ray, actors, controller. Owns all of them and ends them
in the reverse order, whether the run succeeds, fails, or is interrupted.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from rlneuron import cluster, feasibility, models, run_data, run_folder
from rlneuron.batch_arithmetic import BatchArithmetic
from rlneuron.config import RunConfig
from rlneuron.console import ProgressView
from rlneuron.controller import Controller
from rlneuron.device import build, select
from rlneuron.interrupt import Interrupt
from rlneuron.metrics import MetricsLog, drop_after
from rlneuron.train import INTERRUPTED
from rlneuron.trainer import checkpoint
from rlneuron.waiting import RunError
from rlneuron.workers import Workers, roles

FAILED, REFUSED = 1, 2


class Run:
    """`main()` runs it and returns the exit code."""

    def __init__(
        self, config: RunConfig, *, command: str, run_id: str, controller: type[Controller] = Controller
    ) -> None:
        self.config = config
        self.command = command
        self.run_id = run_id
        self.controller_type = controller
        self.interrupt = Interrupt()
        self.evaluations: list[dict[str, float]] = []

    def main(self) -> int:
        """Exit code: 0 done, 1 failed, 2 refused before the start, 130 interrupted after writing a checkpoint."""
        started = time.perf_counter()
        try:
            with self.interrupt.installed(), ExitStack() as stack:
                try:
                    controller = self._start(stack)
                except ValueError as error:  # the user's mistake; later on a ValueError is ours and shows its trace
                    print(f"rlneuron train: {self.config.with_place(str(error))}", file=sys.stderr)
                    return REFUSED
                try:
                    controller.run()
                except KeyboardInterrupt:
                    self._save_interrupted(controller)
                    return INTERRUPTED
                self.evaluations = controller.evaluations
                self._say_end(controller, time.perf_counter() - started)
                if self.config.ray.keep_alive and self.cluster.started_here:
                    self._keep_alive()
        except KeyboardInterrupt:
            print("interrupted before the first step; nothing was trained", file=sys.stderr)
            return INTERRUPTED
        except RunError as error:
            print(f"rlneuron train: {error}", file=sys.stderr)
            return FAILED
        return 0

    # ---- start ----
    def _start(self, stack: ExitStack) -> Controller:
        config = self.config
        self.arithmetic = BatchArithmetic.from_config(config)
        self.hardware = self._find_hardware()
        split = run_data.read(config)
        model_path = self._find_model()
        tokenizer = models.load_tokenizer(model_path, trust_remote_code=config.model.trust_remote_code)
        self.prompts = run_data.fit(config, split, tokenizer)
        print(f"data: {self.prompts.description}", flush=True)
        self.arithmetic = BatchArithmetic.from_config(config, num_prompts=len(self.prompts.stream.rows))
        feasibility.check(config, model_path)
        self.folder, resume_from = run_folder.prepare(config)
        (self.folder / "config.yaml").write_text(config.to_yaml())
        self.cluster = self._start_ray(stack)
        workers = self._start_workers(stack, model_path)
        if resume_from is not None:
            drop_after(self.folder / "metrics.jsonl", checkpoint.step_of(resume_from))
        log = MetricsLog(
            self.folder, run_name=self.folder.name, report_to=self._report_to(), config=config.model_dump(mode="json")
        )
        stack.callback(log.close)
        first = checkpoint.step_of(resume_from) if resume_from else 0
        view = stack.enter_context(ProgressView(max_steps=self.arithmetic.max_steps, first_step=first))
        controller = self.controller_type(
            config,
            self.arithmetic,
            workers=workers,
            prompts=self.prompts,
            output_dir=self.folder,
            log=log,
            view=view,
            interrupt=self.interrupt,
        )
        if resume_from is not None:
            controller.resume(resume_from)
            view.say(f"resumed from {resume_from} at step {controller.step}")
        return controller

    def _find_hardware(self) -> select.Hardware:
        device = self.config.device
        info = select.describe(device.type, instance=device.instance, simulate=device.simulate, hbm_gib=device.hbm_gib)
        print(f"device: {info.description}", flush=True)
        if info.simulated or device.type == "cpu":
            build.build()
        return info

    def _find_model(self) -> str:
        path = self.config.model.path
        if path == "rlneuron/quickstart":
            from rlneuron import quickstart

            return str(quickstart.ensure(self.config.train.seed))
        if path == "rlneuron/smollm2":
            from rlneuron import smollm2

            return str(smollm2.folder())
        return path

    def _start_ray(self, stack: ExitStack) -> cluster.Cluster:
        config = self.config
        namespace = f"rlneuron-{self.run_id}"
        # Registered before the start: an interrupt in the middle of it leaves nothing behind.
        stack.callback(cluster.stop, cluster.children())
        if config.ray.address:
            joined = cluster.join(config.ray.address, namespace=namespace)
        else:
            cores = {"neuron_cores": float(self.hardware.num_cores)} if self.hardware.simulated else {}
            joined = cluster.start(
                run_folder=self.folder,
                resources=cores,
                include_dashboard=config.ray.dashboard,
                namespace=namespace,
            )
        if joined.dashboard_url:
            print(f"dashboard: {joined.dashboard_url}" + _token_hint(joined.token_path), flush=True)
        return joined

    def _start_workers(self, stack: ExitStack, model_path: str) -> Workers:
        resource = cluster.RESOURCE.get(self.config.device.type)
        group = cluster.reserve(roles(self.config), resource, timeout_s=self.config.ray.start_timeout_s)
        # Weights travel through memory, never over a disk: /dev/shm where there is one.
        base = Path("/dev/shm") if os.path.isdir("/dev/shm") else self.folder
        segment = base / f"rlneuron-{self.run_id}"
        stack.callback(lambda: segment.unlink(missing_ok=True))
        workers = Workers(
            self.config,
            self.arithmetic,
            model_path=model_path,
            group=group,
            resource=resource,
            segment_path=segment,
            stack=stack,
        )
        for line in workers.describe():
            print(f"actor: {line}", flush=True)
        return workers

    def _report_to(self) -> list[str]:
        report_to = self.config.logging.report_to
        return [] if report_to == "none" else [report_to]

    # ---- end ----
    def _save_interrupted(self, controller: Controller) -> None:
        controller.view.finish()
        controller.view.say("interrupted: writing a checkpoint")
        try:
            self._say_where(controller, controller.save())
        except KeyboardInterrupt:
            controller.view.say("interrupted again: no checkpoint was written")

    def _say_end(self, controller: Controller, wall_s: float) -> None:
        controller.view.finish()
        for row in controller.evaluations:
            controller.view.say(
                f"step {int(row['step']):>4}  eval_reward {row['eval_reward']:.3f}  "
                f"eval_reward_greedy {row['eval_reward_greedy']:.3f}"
            )
        controller.view.say(f"done: {controller.step} steps in {wall_s:.0f} s (wall, everything included)")
        self._say_where(controller, self.folder / f"checkpoint-{controller.step}")

    def _say_where(self, controller: Controller, saved: Path) -> None:
        say = controller.view.say
        say(f"checkpoint:  {saved}  (loads with AutoModelForCausalLM.from_pretrained)")
        say(f"metrics:     {self.folder / 'metrics.jsonl'}")
        if self.config.logging.log_completions:
            say(f"completions: {self.folder / 'completions'}")
        max_steps = self.arithmetic.max_steps
        command = _without(self.command, "train.output_dir", "train.resume", "train.max_steps")
        more = f" train.max_steps={max_steps if controller.step < max_steps else max_steps * 2}"
        say(f"go on:       {command} {shlex.quote(f'train.output_dir={self.folder}')} train.resume=auto{more}")
        say(f"dashboard:   {self.command} ray.keep_alive=true   keeps it open after the run")

    def _keep_alive(self) -> None:
        hint = _token_hint(self.cluster.token_path)
        print(f"the dashboard stays at {self.cluster.dashboard_url}{hint}; Ctrl-C ends it", flush=True)
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            return


def _without(command: str, *keys: str) -> str:
    """The command line without assignments to `keys`."""
    return shlex.join(word for word in shlex.split(command) if word.split("=")[0] not in keys)


def _token_hint(token_path: Path | None) -> str:
    return f"  (token: in the file {token_path})" if token_path else ""
