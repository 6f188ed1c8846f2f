"""Each benchmark script once at --small: the table that it writes, and the columns of its data file."""

import csv
import importlib
import importlib.util
import json
import pathlib

import pytest

from domino_jax.recipe import cli
from tests.helpers.paths import ROOT

COMPILERS = importlib.util.find_spec("libtpu")


def run(tmp_path: pathlib.Path, module: str, *flags: str) -> None:
    importlib.import_module(f"benchmarks.{module}").main(["--small", *flags])


def rows(tmp_path: pathlib.Path, name: str) -> list[dict[str, str]]:
    """The data file of a section, whose marks the page has."""
    assert f"<!-- {name}: begin -->" in (tmp_path / "page.md").read_text()
    with (tmp_path / "data" / f"{name.replace(' ', '_')}.csv").open() as file:
        return list(csv.DictReader(file))


def places(tmp_path: pathlib.Path) -> list[str]:
    return [f"--workdir={tmp_path / 'work'}", f"--page={tmp_path / 'page.md'}"]


@pytest.mark.slow(minutes=2)
def test_ablations(tmp_path):
    run(tmp_path, "studies.ablations", *places(tmp_path))
    table = rows(tmp_path, "ablation head")
    assert len(table) == 3 and all(float(row["tau"]) >= 1 and float(row["base_loss"]) > 0 for row in table)
    assert all(float(row["identical"]) == 1.0 for row in table)


@pytest.mark.slow(minutes=6)
def test_heads(tmp_path):
    run(tmp_path, "studies.heads", *places(tmp_path))
    table = rows(tmp_path, "heads b")
    assert [row["drafter"] for row in table] == ["DFlash (no head)", "Domino", "EAGLE-3"]
    for row in table:
        assert 1 <= float(row["tau_t0"]) <= 4 and float(row["tflops"]) > 0 and float(row["trained_m"]) > 0
        assert float(row["tokens_s"]) > 0 and float(row["round_ms"]) > 0
    assert " 0 differ by more than a near tie" in (tmp_path / "page.md").read_text()


@pytest.mark.slow(minutes=8)
def test_beyond(tmp_path):
    run(tmp_path, "studies.beyond", "--table=multiscale", *places(tmp_path))
    assert [row["rank"] for row in rows(tmp_path, "beyond multiscale_domino")] == ["16", "32", "64"]
    variant = "--variant=dpace train.dpace_alpha=0.75"
    run(tmp_path, "studies.beyond", "--table=best", "--width=4", variant, *places(tmp_path))
    table = rows(tmp_path, "beyond best")
    assert [row["drafter"] for row in table] == ["domino", "dpace"] and float(table[0]["cost"]) == 1.0


@pytest.mark.slow(minutes=2)
def test_trees(capsys):
    from benchmarks.studies import trees

    flags = ["--config.decode.num_prompts=1", "--config.decode.max_new_tokens=8", "--config.decode.tree.nodes=16"]
    with pytest.raises(SystemExit) as left:
        cli.run(trees.main, ("config",), argv=["trees", f"--config={ROOT / 'configs' / 'tiny.py'}", *flags])
    assert left.value.code == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("chain: τ ") and printed[1].startswith("| nodes |")


def test_compiled_decoding(tmp_path):
    run(tmp_path, "compilers.decode", f"--folder={tmp_path / 'work'}", f"--page={tmp_path / 'page.md'}")
    [row] = rows(tmp_path, "compile chains")
    assert float(row["step moved"]) > 0 and float(row["step bound"]) > 0 and float(row["round64 peak"]) > 0
    assert float(row["round over step"]) > 1


@pytest.mark.slow(minutes=2)
@pytest.mark.skipif(not COMPILERS, reason="needs requirements-compile.txt")
def test_scaling(tmp_path):
    run(tmp_path, "compilers.scaling", f"--folder={tmp_path / 'work'}", f"--page={tmp_path / 'page.md'}")
    [row] = rows(tmp_path, "scaling")
    assert not row["error"] and float(row["peak_gb"]) > 0 and float(row["tflop_row"]) > 0


@pytest.mark.parametrize("module", ["device.decode_latency", "device.train_step", "device.drafter_rounds"])
def test_single_measurements(tmp_path, module):
    run(tmp_path, module, f"--output={tmp_path / 'figures.json'}")
    figures = json.loads((tmp_path / "figures.json").read_text())
    if module == "device.decode_latency":
        parts = figures["parts"]
        assert {"step", "draft", "head", "verify(17)", "commit", "round"} <= set(parts)
        assert parts["verify(17)"]["must_bytes"] > parts["step"]["must_bytes"]
    elif module == "device.train_step":
        assert {"whole", "without_target"} <= set(figures) and figures["whole"]["tokens_per_second"] > 0
    else:
        assert len(figures["seconds"]) == 3 and len(figures["bytes"]) == 2


def test_regeneration(tmp_path):
    run(tmp_path, "device.regeneration", f"--page={tmp_path / 'page.md'}")
    plain, drafted = rows(tmp_path, "regeneration")
    assert float(plain["ratio"]) == 1.0 and int(drafted["row_rounds"]) < int(plain["row_rounds"])
    assert all(0 <= float(row["finished"]) < 1 for row in (plain, drafted))


def test_data_pipeline(tmp_path):
    run(tmp_path, "device.data_pipeline", f"--page={tmp_path / 'page.md'}")
    table = rows(tmp_path, "data_pipeline")
    assert len(table) == 5 and float(table[0]["rows_s"]) > 0 and float(table[-1]["wait_ms"]) >= 0


def test_transformers(tmp_path):
    pytest.importorskip("torch")
    run(tmp_path, "peers.transformers", f"--page={tmp_path / 'page.md'}")
    table = rows(tmp_path, "against_transformers tiny_qwen3")
    assert len(table) == 4 and {row["same"] for row in table} == {"1 of 1"}
