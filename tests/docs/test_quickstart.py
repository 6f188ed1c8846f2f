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
