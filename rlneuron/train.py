"""`python -m rlneuron.train CONFIG.yaml [OVERLAY.yaml ...] [key.sub=value ...]`: the entry of a run, and only that.

Order: read and check the configuration, find the hardware, make or find model and data, check that it fits, start
Ray and the actors, hand over to the controller, and end every process whatever happens. Exit codes: 0 done, 2 the
configuration or data is wrong, 1 the run failed, 130 interrupted (a checkpoint is written).
"""

from __future__ import annotations

import os
import shlex
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rlneuron.config import ConfigError, load_config
from rlneuron.config_rules import warnings

INTERRUPTED = 130

Arguments = Annotated[
    list[str], typer.Argument(help="YAML files, merged left to right, and key.sub=value assignments.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")]


def train(arguments: Arguments, dry_run: DryRun = False) -> None:
    """Train by reinforcement learning as the YAML file says."""
    code = run_command(arguments, dry_run=dry_run)
    if code == INTERRUPTED:
        # Ray's threads, interrupted in the middle of a start, can crash the interpreter's own clean-up; ours is done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)


def run_command(arguments: Sequence[str], *, dry_run: bool = False) -> int:
    """What the command does; returns the exit code."""
    files = [Path(argument) for argument in arguments if "=" not in argument]
    assignments = [argument for argument in arguments if "=" in argument]
    try:
        config = load_config(files, assignments)
        if dry_run:
            print(config.to_yaml())
            print(config.batch.describe())
        for text in warnings(config):
            print(f"warning: {text}", file=sys.stderr)
        if dry_run:
            return 0
    except ConfigError as error:
        print(f"rlneuron train: {error}", file=sys.stderr)
        return 2
    command = shlex.join(["python", "-m", "rlneuron.train", *arguments])
    from rlneuron.run import Run  # torch, Ray and transformers load only once the configuration holds

    return Run(config, command=command, run_id=uuid.uuid4().hex[:8]).main()


def main() -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(train)
    app()


if __name__ == "__main__":
    main()
