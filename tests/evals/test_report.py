"""report.py: the sections of a report; files whole; tables that state what was measured."""

import io
import json

import rich.console

from domino_jax.decoding.generate import Clock
from domino_jax.evals.report import print_tables, read_report, write_report
from domino_jax.evals.tables import sections
from tests.helpers.report_runs import FAST, PLAIN, SPLIT, report_of, run_of, two_runs


def test_a_mode_that_was_not_timed_has_no_split():
    modes = report_of()["modes"]
    assert modes["autoregressive"]["time_split"] is modes["autoregressive"]["break_even_tau"] is None
    assert (modes["domino"]["time_split"], modes["domino"]["break_even_tau"]) == (SPLIT, 1.3)


def test_each_task_has_its_figures_and_the_average_is_over_tasks():
    slow = run_of(FAST, Clock(decode_seconds=13.0), found=[])
    other = {"autoregressive": run_of(PLAIN, Clock(decode_seconds=26.0)), "domino": slow}
    report = report_of(tasks={"gsm8k": two_runs(), "mbpp": other})
    domino = {name: figures["domino"] for name, figures in report["tasks"].items()}
    assert {name: figures["speedup"] for name, figures in domino.items()} == {"gsm8k": 4.0, "mbpp": 2.0}
    assert domino["gsm8k"]["identical"]["same"] == 2 and report["average"]["domino"]["speedup"] == 3.0
    assert ["Domino", "4.00 × / 2.17", "2.00 × / 2.17", "3.00 × / 2.17"] in sections(report)[0][2]


def test_what_is_written_is_what_is_read_and_a_folder_without_report_is_unfinished(tmp_path):
    assert read_report(tmp_path) is None
    report = report_of()
    write_report(tmp_path, report)
    assert read_report(tmp_path) == json.loads(json.dumps(report))
    names = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file())
    assert names == ["plots/accept_lengths.png", "report.html", "report.json"]
    assert (tmp_path / names[0]).read_bytes().startswith(b"\x89PNG")
    assert {"jax", "flax", "python", "domino_jax"} <= report["versions"].keys()


def test_no_cell_of_a_table_is_cut_on_a_narrow_console():
    console = rich.console.Console(file=io.StringIO(), width=40)
    rows = [["probability", *(f"drafter_{column}" for column in range(9))], ["0.0 to 0.1", *["0.02 / 0.05"] * 9]]
    print_tables([rows], console)
    printed = console.file.getvalue()
    assert all(cell in printed for row in rows for cell in row) and printed.count("0.02 / 0.05") == 9
    assert console.width == 40
