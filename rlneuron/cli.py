"""The `rlneuron` command: `build` compiles the device, `train` is the same function as `python -m rlneuron.train`."""

from __future__ import annotations

import typer

from rlneuron import train as train_command

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("train")(train_command.train)


@app.callback()
def rlneuron() -> None:
    """RL post-training of language models on Ray and (simulated) AWS Trainium."""


@app.command()
def build(verbose: bool = typer.Option(False, "--verbose", help="Show the compiler's output.")) -> None:
    """Compile the neuron device and its operators: once per machine, cached by sources and torch version."""
    from rlneuron.device import build as device_build

    for path in device_build.build(verbose=verbose):
        typer.echo(f"built: {path}")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
