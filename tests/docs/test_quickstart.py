"""The notebook of docs/ runs from top to bottom."""

import json
import subprocess
import sys

import pytest

from tests.helpers.environment import optimizing
from tests.helpers.paths import ROOT

NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"


def code_cells() -> list[dict]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def code() -> str:
    return "\n\n".join("".join(cell["source"]) for cell in code_cells())


def test_the_notebook_is_stored_with_its_outputs_and_pictures():
    cells = code_cells()
    showing = [
        cell
        for cell in cells
        if "print(" in "".join(cell["source"]) and "timing" not in cell["metadata"].get("tags", [])
    ]
    assert showing and all(cell["outputs"] for cell in showing)
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert "error" not in kinds
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell["outputs"])


@pytest.mark.slow(minutes=5)
def test_the_notebook_runs(tmp_path):
    script = tmp_path / "quickstart.py"
    script.write_text(code(), encoding="utf-8")
    environment = optimizing() | {"MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT / "docs", env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "τ" in done.stdout and "tokens/s" in done.stdout
