"""metrics.py: one row a step, none lost and none told twice, whatever kills the run."""

import io
import json

import jax.numpy as jnp
import pytest
import rich.console

from domino_jax.errors import DataError
from domino_jax.metrics import MetricsWriter, read_rows, truncate_rows


def log_console():
    return rich.console.Console(file=io.StringIO(), force_terminal=False, width=40)


def write_steps(workdir, steps, start_step=0, console=None):
    with MetricsWriter(workdir, 10, start_step=start_step, console=console or log_console()) as metrics:
        for step in steps:
            metrics.write(step, {"loss": jnp.float32(step / 2), "lambda_base": 1.0})


def test_a_row_holds_step_values_and_seconds(tmp_path):
    write_steps(tmp_path, [1, 2])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [sorted(row) for row in rows] == [["lambda_base", "loss", "seconds", "step"]] * 2
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 0.5), (2, 1.0)]
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_row_is_on_disk_before_the_run_ends(tmp_path):
    metrics = MetricsWriter(tmp_path, 10, console=log_console())
    metrics.write(1, {"loss": 0.5})
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1
    metrics.close()


def test_values_keep_every_bit(tmp_path):
    value = 0.1 + 0.2
    with MetricsWriter(tmp_path, 10, console=log_console()) as metrics:
        metrics.write(1, {"loss": value})
    assert read_rows(tmp_path / "metrics.jsonl")[0]["loss"].hex() == value.hex()


def test_a_resumed_run_drops_the_rows_behind_its_step_and_goes_on_counting_time(tmp_path):
    write_steps(tmp_path, [2, 4, 6])
    rows = read_rows(tmp_path / "metrics.jsonl")
    rows[1]["seconds"] = 100.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_steps(tmp_path, [6, 8], start_step=4)
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    assert rows[2]["seconds"] >= 100.0


def test_a_line_torn_by_a_kill_is_not_a_row(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "lo')
    assert truncate_rows(file, last_step=5) == [{"step": 1}]
    assert file.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("line", ["{broken", "[1]", '{"loss": 1}'])
def test_a_broken_row_in_the_middle_is_named_by_its_line(tmp_path, line):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl:2"):
        read_rows(file)


def test_no_file_is_no_rows(tmp_path):
    assert read_rows(tmp_path / "metrics.jsonl") == []
    assert truncate_rows(tmp_path / "metrics.jsonl", 3) == []
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_value_that_is_not_finite_is_null_in_the_file(tmp_path):
    with MetricsWriter(tmp_path, 10, console=log_console()) as metrics:
        metrics.write(1, {"loss": float("nan"), "grad_norm": float("inf")})
    row = read_rows(tmp_path / "metrics.jsonl")[0]
    assert row["loss"] is None and row["grad_norm"] is None


def test_a_log_gets_one_plain_line_a_step(tmp_path):
    console = log_console()
    write_steps(tmp_path, [5, 10], console=console)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 5/10  loss 2.5  λ 1  left ")
    assert lines[1].endswith("left 0:00:00")
    assert "\x1b" not in console.file.getvalue()


def test_a_terminal_gets_a_bar_with_the_time_left(tmp_path):
    console = rich.console.Console(file=io.StringIO(), force_terminal=True, width=120)
    with MetricsWriter(tmp_path, 10, console=console) as metrics:
        metrics.write(5, {"loss": 2.5})
        metrics.advance(7)
        metrics.say("a word beside the bar [not markup]")
    shown = console.file.getvalue()
    assert "7/10" in shown and "loss 2.5" in shown and "left" in shown and "[not markup]" in shown
