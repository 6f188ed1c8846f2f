"""The studies of widths and windows once on a few prompts: the table that each writes."""

import pytest

from benchmarks.studies import adaptive, windows
from domino_jax.recipe import cli
from tests.helpers.paths import ROOT
from tests.helpers.studies import rows


def start(study, recipe: str, **values) -> None:
    words = [f"--config={ROOT / 'configs' / recipe}.py", *(f"--config.{key}={value}" for key, value in values.items())]
    with pytest.raises(SystemExit) as left:
        cli.run(study.main, ("config",), argv=["study", *words])
    assert left.value.code == 0


@pytest.mark.slow(minutes=4)
def test_adaptive(capsys):
    few = {"decode.num_prompts": 3, "decode.max_new_tokens": 16}
    start(adaptive, "tiny", **few, **{"decode.concurrency": "(2,)"})
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in table[2:]][:2] == ["1 rows", "2 rows"]
    assert "easy, hard, easy" in table[-1]


@pytest.mark.slow(minutes=3)
def test_windows(smollm2, tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "DOCS", tmp_path)
    few = {"decode.num_prompts": 1, "decode.max_new_tokens": 8, "decode.cache_length": 512}
    start(windows, "smollm2_135m", **few, **{"target.path": smollm2})
    [row] = rows(tmp_path, "windows smollm2", "smollm2.md")
    assert float(row["length"]) <= 200 and float(row["step"]) > 0
    assert all(1 <= float(row[f"tau {name}"]) <= 7 and float(row[f"round {name}"]) > 0 for name in windows.WINDOWS)
