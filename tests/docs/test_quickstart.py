"""The notebooks of docs/ run from top to bottom."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.helpers.environment import optimizing
from tests.helpers.paths import ROOT

TINY, SMOLLM2 = NOTEBOOKS = [ROOT / "docs" / f"{name}.ipynb" for name in ("quickstart", "quickstart_smollm2")]


def code_of(notebook: pathlib.Path) -> str:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_is_stored_with_its_outputs_and_pictures(notebook):
    cells = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    showing = [
        cell
        for cell in cells
        if "print(" in "".join(cell["source"]) and "timing" not in cell["metadata"].get("tags", [])
    ]
    assert showing and all(cell["outputs"] for cell in showing)
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert "error" not in kinds
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell["outputs"])
    compile(code_of(notebook), str(notebook), "exec")


def run(code: str, folder: pathlib.Path) -> str:
    script = folder / "quickstart.py"
    script.write_text(code, encoding="utf-8")
    environment = optimizing() | {"MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT / "docs", env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "τ" in done.stdout and "tokens/s" in done.stdout
    return done.stdout


@pytest.mark.slow(minutes=5)
def test_the_notebook_of_the_tiny_model_runs(tmp_path):
    run(code_of(TINY), tmp_path)


@pytest.mark.slow(minutes=5)
def test_the_notebook_of_the_real_model_runs(smollm2, tmp_path):
    code = code_of(SMOLLM2)
    place = 'str(assets / "smollm2")'
    assert code.count(place) == 1
    assert "scattering" in run(code.replace(place, repr(str(smollm2))), tmp_path)
