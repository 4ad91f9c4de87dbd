"""The notebook runs from top to bottom, and what it shows is so."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "reward_experiments.ipynb"


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


def test_the_notebook_runs_and_its_reward_rises(tmp_path: Path) -> None:
    spec = KernelSpecManager().get_kernel_spec("python3")
    assert spec.argv[0] in ("python", "python3", sys.executable)
    spec.argv[0] = sys.executable  # the kernel of this environment, whatever `python` is on PATH
    notebook = nbformat.read(NOTEBOOK, 4)
    notebook.cells.append(nbformat.v4.new_code_cell("print('HISTORY', history['exact'].tolist())"))
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # an exception in any cell fails the test
    output = notebook.cells[-1].outputs[0].text
    rewards = [float(x) for x in re.findall(r"[\d.]+", output.partition("[")[2])]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) == 2
