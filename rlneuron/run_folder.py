"""The folder of a run: chosen so that nothing of an earlier run is overwritten."""

from __future__ import annotations

from pathlib import Path

from rlneuron.config import RunConfig
from rlneuron.trainer import checkpoint


def prepare(config: RunConfig) -> tuple[Path, Path | None]:
    """(run folder, checkpoint to resume from or None). Creates the folder.

    `train.resume: never` starts in `train.output_dir`, or in a numbered sibling ("runs/x-2") if that holds a run;
    `auto` goes on from its newest checkpoint, or starts if there is none; a path goes on from that checkpoint.
    """
    base = Path(config.train.output_dir or "runs/run").expanduser().resolve()
    resume = config.train.resume
    if resume == "auto":
        base.mkdir(parents=True, exist_ok=True)
        return base, checkpoint.latest(base)
    if resume != "never":
        chosen = Path(resume).expanduser().resolve()
        if not (chosen / "trainer_state.json").is_file():
            raise ValueError(
                f"train.resume: {resume!r} is not a checkpoint folder (it has no trainer_state.json); write auto, "
                "never, or the path of a checkpoint-<step> folder"
            )
        return _fresh(base) if base != chosen.parent else base, chosen
    return _fresh(base), None


def _fresh(base: Path) -> Path:
    folder, number = base, 2
    while (folder / "metrics.jsonl").exists() or checkpoint.latest(folder) is not None:
        folder, number = base.with_name(f"{base.name}-{number}"), number + 1
    folder.mkdir(parents=True, exist_ok=True)
    return folder
