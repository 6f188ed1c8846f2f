"""Each benchmark script once at --small: the table that it writes, and the columns of its data file."""

import importlib.util
import json

import pytest

from tests.helpers.studies import rows, run

COMPILERS = importlib.util.find_spec("libtpu")


def test_compiled_decoding(tmp_path):
    run("compilers.decode", f"--folder={tmp_path / 'work'}", f"--page={tmp_path / 'page.md'}")
    [row] = rows(tmp_path, "compile chains")
    assert float(row["step moved"]) > 0 and float(row["step bound"]) > 0 and float(row["round64 peak"]) > 0
    assert float(row["round over step"]) > 1


@pytest.mark.slow(minutes=2)
@pytest.mark.skipif(not COMPILERS, reason="needs requirements-compile.txt")
def test_scaling(tmp_path):
    run("compilers.scaling", f"--folder={tmp_path / 'work'}", f"--page={tmp_path / 'page.md'}")
    [row] = rows(tmp_path, "scaling")
    assert not row["error"] and float(row["peak_gb"]) > 0 and float(row["tflop_row"]) > 0


@pytest.mark.parametrize("module", ["device.decode_latency", "device.train_step"])
def test_single_measurements(tmp_path, module):
    run(module, f"--output={tmp_path / 'figures.json'}")
    figures = json.loads((tmp_path / "figures.json").read_text())
    if module == "device.decode_latency":
        parts = figures["parts"]
        assert {"step", "draft", "head", "verify(17)", "commit", "round"} <= set(parts)
        assert parts["verify(17)"]["must_bytes"] > parts["step"]["must_bytes"]
    else:
        assert {"whole", "without_target"} <= set(figures) and figures["whole"]["tokens_per_second"] > 0
