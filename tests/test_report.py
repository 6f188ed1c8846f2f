"""report.py: figures of hand-made runs, to the digit; files whole; tables that say what was measured."""

import io
import json

import pytest
import rich.console

from domino_jax.decoding.generate import Clock, Generation
from domino_jax.decoding.measure import Divergence, ModeRun, accept_histogram, accept_rates
from domino_jax.errors import DataError
from domino_jax.report import (
    build_report,
    console_table,
    loop_steps,
    markdown,
    read_report,
    write_report,
)

FACTS = {
    "settings": {"temperature": 0.0},
    "target": {"path": "TARGET"},
    "drafter": {"path": "DRAFTER", "block_size": 3},
    "prompts": {"source": "PROMPTS", "count": 2, "checked": 2},
    "dtype": "float32",
    "thinking": False,
    "template_sha256": None,
    "block_size": 3,
    "verify_width": 4,
}


def answer(tokens, accepts=(), reason="length"):
    return Generation(list(range(tokens)), list(accepts), reason)


def two_runs():
    """13 tokens behind the first ones. Plain: 26 s, 2 s a token. Domino: rounds of 4, 1, 1, 2 and of 4, 1; 6.5 s."""
    plain = ModeRun("autoregressive", [answer(9), answer(6, reason="stop")], Clock(0.5, 26.0, 3.0, 13))
    fast = ModeRun("domino", [answer(9, [4, 1, 1, 2]), answer(6, [4, 1], "stop")], Clock(0.75, 6.5, 4.0, 13))
    return {"autoregressive": plain, "domino": fast}


def report_of(runs, **changes):
    arguments = {
        "batch_size": 1,
        "divergences": {"domino": []},
        "split": {"domino": {"draft": 0.001, "head": 0.002, "verify": 0.003, "other": 0.0005, "round": 0.0065}},
        "straight_step": 1.6,
        "answers_right": {"autoregressive": 2, "domino": 1},
        "facts": FACTS,
    }
    return build_report(runs, **{**arguments, **changes})


def test_tau_counts_rounds_and_not_the_token_of_the_prefill():
    domino = report_of(two_runs())["modes"]["domino"]
    assert domino["tau_pooled"] == 13 / 6
    assert domino["tau_per_prompt"] == (8 / 4 + 5 / 2) / 2
    assert domino["rounds"] == 6


def test_rates_leave_out_prefill_and_compilation():
    modes = report_of(two_runs())["modes"]
    assert modes["autoregressive"]["tokens_per_second"] == 0.5
    assert modes["domino"]["tokens_per_second"] == 2.0
    assert modes["domino"]["milliseconds_per_token"] == 500.0
    assert (modes["domino"]["prefill_seconds"], modes["domino"]["compile_seconds"]) == (0.75, 4.0)
    assert (modes["domino"]["tokens"], modes["domino"]["decode_tokens"]) == (15, 13)


def test_speedup_is_against_the_autoregressive_mode_of_the_same_run():
    modes = report_of(two_runs())["modes"]
    assert (modes["autoregressive"]["speedup"], modes["domino"]["speedup"]) == (1.0, 4.0)
    alone = report_of({"domino": two_runs()["domino"]}, divergences={})
    assert alone["modes"]["domino"]["speedup"] is None
    assert alone["autoregressive_step_ms"] is None and alone["identical_outputs"] == {}


def test_histogram_and_acceptance_by_position():
    answers = two_runs()["domino"].generations
    histogram = accept_histogram(answers, 4)
    assert histogram == {"1": 3, "2": 1, "3": 0, "4": 2}
    assert accept_rates(histogram) == ([3 / 6, 2 / 6, 2 / 6], [3 / 6, 2 / 3, 2 / 2])


def test_a_position_that_no_round_reached_has_no_conditional_rate():
    assert accept_rates({"1": 5, "2": 0, "3": 0}) == ([0.0, 0.0], [0.0, None])


def test_a_mode_without_rounds_has_no_tau():
    plain = report_of(two_runs())["modes"]["autoregressive"]
    assert plain["tau_pooled"] is None and plain["tau_per_prompt"] is None
    assert plain["accept_histogram"] == {} and plain["accept_rate_by_position"] == []


def test_a_batch_takes_the_steps_of_its_longest_row():
    plain = [answer(9), answer(6), answer(3)]
    assert loop_steps(plain, 1) == 8 + 5 + 2
    assert loop_steps(plain, 2) == 8 + 2
    assert loop_steps([answer(9, [4, 4]), answer(4, [1, 1, 1])], 2) == 3


def test_the_yardstick_is_shown_beside_a_straight_line_step():
    report = report_of(two_runs())
    assert report["autoregressive_step_ms"] == 2000.0
    assert report["straight_step_ms"] == 1600.0
    assert report["autoregressive_over_straight"] == 1.25


def test_divergences_are_counted_as_near_ties_or_violations():
    found = [Divergence(0, 3, 5e-5, True), Divergence(1, 2, float("inf"), False)]
    identical = report_of(two_runs(), divergences={"domino": found})["identical_outputs"]["domino"]
    assert (identical["same"], identical["of"], identical["near_ties"], identical["violations"]) == (0, 2, 1, 1)
    assert identical["first_divergences"][1] == {"prompt": 1, "position": 2, "margin": None, "near_tie": False}


def test_the_time_split_is_in_milliseconds_and_only_where_measured():
    modes = report_of(two_runs())["modes"]
    assert modes["autoregressive"]["time_split"] is None
    assert modes["domino"]["time_split"] == {
        "unit": "milliseconds per round",
        "draft": 1.0,
        "head": 2.0,
        "verify": 3.0,
        "other": 0.5,
        "round": 6.5,
    }


def test_equal_answers_count_once():
    runs = {"autoregressive": ModeRun("autoregressive", [answer(5), answer(5), answer(6)], Clock(decode_seconds=1.0))}
    figures = report_of(runs, divergences={}, split={}, answers_right=None)["modes"]["autoregressive"]
    assert figures["distinct_answers"] == 2
    assert figures["answers_right"] is None


def test_what_is_written_is_what_is_read_and_a_folder_without_report_is_unfinished(tmp_path):
    assert read_report(tmp_path) is None
    report = report_of(two_runs())
    write_report(tmp_path, report)
    assert read_report(tmp_path) == json.loads(json.dumps(report))
    names = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file())
    assert names == ["plots/accept_lengths.png", "plots/acceptance_by_position.png", "report.json", "report.md"]
    assert (tmp_path / "plots" / "accept_lengths.png").read_bytes().startswith(b"\x89PNG")
    assert {"jax", "flax", "python", "domino_jax"} <= report["versions"].keys()


def test_without_a_drafting_mode_there_are_no_pictures(tmp_path):
    write_report(tmp_path, report_of({"autoregressive": two_runs()["autoregressive"]}, divergences={}))
    assert not (tmp_path / "plots").exists()
    assert "![" not in (tmp_path / "report.md").read_text()


def test_a_damaged_report_is_no_report(tmp_path):
    (tmp_path / "report.json").write_text('{"modes": ')
    with pytest.raises(DataError, match="report.json is no JSON"):
        read_report(tmp_path)


def test_markdown_and_console_say_the_same_figures():
    report = report_of(two_runs(), divergences={"domino": [Divergence(0, 3, 1.0, False)]})
    console = rich.console.Console(file=io.StringIO(), width=120)
    console_table(report, console)
    page = markdown(report, ["plots/accept_lengths.png"])
    for text in (console.file.getvalue(), page):
        for said in ("2.17", "2.25", "4.00 ×", "1 of 2 (1 UNEXPLAINED)", "2 of 2", "2000.00 ms", "at most 4 tokens"):
            assert said in text
    assert "| domino | 0.50 (0.50) | 0.33 (0.67) | 0.33 (1.00) |" in page
    assert "![accept lengths](plots/accept_lengths.png)" in page
