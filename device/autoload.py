"""What `import torch` calls (entry point group `torch.backends`): activates the simulation when `RLNEURON_SIM` asks.

Without that variable it imports nothing and returns. With it, a mistake is printed rather than raised, because an
exception here would break `import torch` for every program of the environment.
"""

from __future__ import annotations

import os
import sys


def autoload() -> None:
    """Activates the simulated device if `RLNEURON_SIM=<instance>[,hbm_gib=N][,numerics=exact]` is set; never raises."""
    text = os.environ.get("RLNEURON_SIM", "").strip()
    if not text:
        return
    try:
        from rlneuron.device import select

        select.choose("neuron", **parse(text))  # type: ignore[arg-type]
    except BaseException as error:
        print(f"rlneuron: RLNEURON_SIM={text}: {error}", file=sys.stderr)


def parse(text: str) -> dict[str, str | float | bool]:
    """The arguments of `select.choose` that `RLNEURON_SIM` stands for. Raises ValueError for an unknown key."""
    instance, *options = (part.strip() for part in text.split(","))
    arguments: dict[str, str | float | bool] = {"instance": instance, "simulate": True}
    for option in options:
        key, equals, value = option.partition("=")
        if key == "hbm_gib" and equals:
            try:
                arguments["hbm_gib"] = float(value)
            except ValueError:
                raise ValueError(f"hbm_gib: {value!r} is not a number of GiB") from None
        elif key == "numerics" and equals:
            arguments["numerics"] = value
        else:
            raise ValueError(f"unknown setting {option!r}; write RLNEURON_SIM=<instance>[,hbm_gib=N][,numerics=exact]")
    return arguments
