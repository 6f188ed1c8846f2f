"""The studies of noise and widths once on a few prompts: the table that each writes."""

import pytest

from benchmarks.studies import adaptive
from domino_jax.recipe import cli
from tests.helpers.paths import ROOT
from tests.helpers.studies import rows, run


@pytest.mark.slow(minutes=3)
def test_chains(tmp_path):
    """The command itself holds its replay against real rounds."""
    run("studies.chains", f"--page={tmp_path / 'page.md'}")
    table = rows(tmp_path, "noise tiny")
    assert len(table) == 6 and all(1 <= float(row[c]) <= 9 for row in table for c in ("0.5", "1", "inf"))


@pytest.mark.slow(minutes=4)
def test_adaptive(capsys):
    flags = ["--config.decode.num_prompts=3", "--config.decode.max_new_tokens=16", "--config.decode.concurrency=(2,)"]
    with pytest.raises(SystemExit) as left:
        cli.run(adaptive.main, ("config",), argv=["adaptive", f"--config={ROOT / 'configs' / 'tiny.py'}", *flags])
    assert left.value.code == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in table[2:]][:2] == ["1 rows", "2 rows"]
    assert "easy, hard, easy" in table[-1]
