"""The view of a run: plain lines without a terminal, a table on one, and nothing lost between."""

from __future__ import annotations

import io

from rich.console import Console

from rlneuron.console import ProgressView


def shown(terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, color_system=None)
    with ProgressView(max_steps=20, first_step=0, console=console) as view:
        view.say("above")
        view.advance(5)
        view.show(5, {"reward": 0.25, "loss": -1.5e-8, "wall_step_s": 0.104, "something/else": 3.0})
        view.finish()
        view.say("below")
    return out.getvalue()


def test_without_a_terminal_there_is_one_line_a_step() -> None:
    assert shown(False).splitlines() == [
        "above",
        "step 5/20 | reward 0.250 | loss -1.5e-08 | wall s 0.104",
        "below",
    ]


def test_on_a_terminal_the_table_stands_between_what_was_said() -> None:
    text = shown(True)
    last = text[text.rindex("reward") :]
    assert "0.250" in last and "5/20" in last
    assert text.index("above") < text.rindex("0.250") < text.rindex("below")
