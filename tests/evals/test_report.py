"""report.py: figures of hand-made runs, to the digit; files whole; tables that say what was measured."""

import dataclasses
import io
import json

import pytest
import rich.console

from domino_jax.decoding.acceptance import accept_histogram, accept_rates
from domino_jax.decoding.generate import Clock, Generation
from domino_jax.evals.lanes import ModeRun
from domino_jax.evals.report import LATER, build_report, console_table, read_report, write_report
from domino_jax.evals.round_times import StepBounds
from domino_jax.evals.run_info import PromptSource, RunInfo
from domino_jax.evals.tables import markdown, notes_of
from domino_jax.runtime.errors import DataError
from tests.helpers.decoding_models import decode_settings_of, random_models

SETTINGS = decode_settings_of(("autoregressive", "backbone", "domino"), max_new_tokens=16, cache_length=64)
INFO = RunInfo(
    SETTINGS,
    "TARGET",
    "DRAFTER",
    PromptSource("PROMPTS"),
    settings=SETTINGS,
    drafter_config=random_models(3).drafter.config,
    prompts=2,
    references=2,
)


def answer(tokens, accepts=(), reason="length"):
    return Generation(list(range(tokens)), list(accepts), reason)


PLAIN = [answer(9), answer(6, reason="stop")]
FAST = [answer(9, [4, 1, 1, 2]), answer(6, [4, 1], "stop")]


def run_of(answers, clock, right=0, found=None):
    """One group an answer, with equal shares of the time."""
    run = ModeRun(answers_right=right)
    for one in answers:
        run.add([one])
        share = {name: value / len(answers) for name, value in vars(clock).items()}
        run.add_group(Clock(**{**share, "decode_tokens": len(one.token_ids) - 1}))
    if found is not None:
        run.add_comparison(len(answers), found)
    return run


def two_runs(found=()):
    """13 tokens behind the first ones. Plain: 26 s, 2 s a token. Domino: rounds of 4, 1, 1, 2 and of 4, 1; 6.5 s."""
    plain = run_of(PLAIN, Clock(0.5, 26.0, 3.0, 13), right=2)
    fast = run_of(FAST, Clock(0.75, 6.5, 4.0, 13), right=1, found=list(found))
    return {"autoregressive": plain, "domino": fast}


SPLIT = {
    "draft": 0.001,
    "head": 0.002,
    "verify": 0.003,
    "other": 0.0005,
    "round": 0.0065,
    "commit": 0.0004,
    "without_head": 0.0045,
}


# An autoregressive step of two_runs takes 2 s.
BOUNDS = StepBounds(bare=1.6, bytes=3_000, bandwidth=2_000.0)


def report_of(runs, info=INFO, **changes):
    return build_report(runs, info, **{"split": {"domino": SPLIT}, "step": BOUNDS, **changes})


def info_with(**settings):
    changed = dataclasses.replace(SETTINGS, **settings)
    return dataclasses.replace(INFO, requested=changed, settings=changed)


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
    alone = report_of({"domino": run_of(FAST, Clock(0.75, 6.5, 4.0, 13))})
    assert alone["modes"]["domino"]["speedup"] is None
    assert alone["autoregressive_step_ms"] is None and alone["identical_outputs"] == {}


def test_histogram_and_acceptance_by_position():
    histogram = accept_histogram(FAST, 4)
    assert histogram == {"1": 3, "2": 1, "3": 0, "4": 2}
    assert accept_rates(histogram) == ([3 / 6, 2 / 6, 2 / 6], [3 / 6, 2 / 3, 2 / 2])


def test_a_position_that_no_round_reached_has_no_conditional_rate():
    assert accept_rates({"1": 5, "2": 0, "3": 0}) == ([0.0, 0.0], [0.0, None])


def test_a_mode_without_rounds_has_no_tau():
    plain = report_of(two_runs())["modes"]["autoregressive"]
    assert plain["tau_pooled"] is None and plain["tau_per_prompt"] is None
    assert plain["accept_histogram"] == {} and plain["accept_rate_by_position"] == []


def test_nobody_counts_the_steps_of_a_batch_whose_rows_are_replaced():
    report = report_of(two_runs(), info_with(batch_size=2))
    assert report["modes"]["autoregressive"]["milliseconds_per_step"] is None
    bounds = report["step_bounds"]
    assert report["autoregressive_step_ms"] is bounds["step_over_bare"] is bounds["step_over_bytes"] is None


def test_a_plain_step_is_shown_beside_its_lower_bounds():
    report = report_of(two_runs())
    assert report["autoregressive_step_ms"] == 2000.0
    assert report["step_bounds"] == {
        "bare_step_ms": 1600.0,
        "step_over_bare": 1.25,
        "bytes": 3_000,
        "copy_bytes_per_second": 2_000.0,
        "bytes_at_copy_bandwidth_ms": 1500.0,
        "step_over_bytes": pytest.approx(4 / 3),
    }
    assert "takes 2000.00 ms; without sampling and bookkeeping 1600.00 ms (1.25 ×); its 0.00 GB" in notes_of(report)[0]


def test_a_bound_that_was_too_fast_to_time_is_left_out():
    report = report_of(two_runs(), step=StepBounds(0.0, 3_000, 0.0))
    assert report["step_bounds"]["bytes_at_copy_bandwidth_ms"] is report["step_bounds"]["step_over_bare"] is None
    assert notes_of(report)[0] == "An autoregressive step takes 2000.00 ms."


def test_divergences_are_counted_as_near_ties_or_violations():
    found = [{"prompt": 0, "near_tie": True}, {"prompt": 1, "near_tie": False}]
    identical = report_of(two_runs(found))["identical_outputs"]["domino"]
    assert (identical["same"], identical["of"], identical["near_ties"], identical["violations"]) == (0, 2, 1, 1)
    assert identical["first_divergences"] == found


def test_the_time_split_is_in_milliseconds_and_only_where_measured():
    modes = report_of(two_runs())["modes"]
    assert modes["autoregressive"]["time_split"] is None
    split = modes["domino"]["time_split"]
    times = {name: split[name] for name in ("draft", "head", "verify", "other", "round", "commit", "without_head")}
    assert list(times.values()) == pytest.approx([1.0, 2.0, 3.0, 0.5, 6.5, 0.4, 4.5])
    assert split["unit"] == "milliseconds per round"
    assert split["head_share"] == pytest.approx(2 / 6.5)  # what leaving it out saves
    assert split["loop_overhead"] == pytest.approx(6.5 / 6.4)


def test_equal_answers_count_once_and_without_checkers_none_is_right():
    run = run_of([answer(5), answer(5), answer(6)], Clock(decode_seconds=1.0))
    unjudged = dataclasses.replace(INFO, references=0)
    figures = report_of({"autoregressive": run}, unjudged)["modes"]["autoregressive"]
    assert figures["distinct_answers"] == 2
    assert figures["answers_right"] is None


def test_a_task_has_figures_of_its_own_and_tasks_weigh_alike_in_the_average():
    slow = run_of(FAST, Clock(decode_seconds=13.0), found=[])
    other = {"autoregressive": run_of(PLAIN, Clock(decode_seconds=26.0)), "domino": slow}
    report = report_of(two_runs(), tasks={"gsm8k": two_runs(), "mbpp": other})
    domino = {name: figures["domino"] for name, figures in report["tasks"].items()}
    assert {name: figures["speedup"] for name, figures in domino.items()} == {"gsm8k": 4.0, "mbpp": 2.0}
    assert domino["gsm8k"]["identical"]["same"] == 2 and domino["gsm8k"]["tau_pooled"] == 13 / 6
    assert report["average"]["domino"]["speedup"] == 3.0
    assert report["average"]["autoregressive"]["tau_pooled"] is None


def test_a_simulated_run_says_so_everywhere_and_claims_no_equal_outputs():
    plain = run_of(PLAIN, Clock(0.5, 26.0, 3.0, 13))
    runs = {"autoregressive": plain, "domino": run_of(FAST, Clock(0.75, 6.5, 4.0, 13))}
    report = report_of(runs, info_with(simulate_tau=7.17))
    assert report["simulated"] == 7.17 and report["identical_outputs"] == {}
    console = rich.console.Console(file=io.StringIO(), width=120)
    console_table(report, console)
    page = markdown(report, [])
    assert page.startswith("# Decoding report (simulated)\n")
    assert "| outputs identical | – | – |" in page and "| answers right | – | – |" in page
    for text in (console.file.getvalue(), page):
        assert "SIMULATED acceptance (τ forced to 7.17" in text


def test_what_is_written_is_what_is_read_and_a_folder_without_report_is_unfinished(tmp_path):
    assert read_report(tmp_path) is None
    report = report_of(two_runs())
    write_report(tmp_path, report)
    assert read_report(tmp_path) == json.loads(json.dumps(report))
    assert LATER.keys() <= report.keys()
    names = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file())
    pictures = ["plots/accept_lengths.png", "plots/acceptance_by_position.png", "plots/round_times.png"]
    assert names == [*pictures, "report.html", "report.json", "report.md", "table.md", "table.tex"]
    assert (tmp_path / "plots" / "accept_lengths.png").read_bytes().startswith(b"\x89PNG")
    assert {"jax", "flax", "python", "domino_jax"} <= report["versions"].keys()


def test_without_a_drafting_mode_there_are_no_pictures(tmp_path):
    write_report(tmp_path, report_of({"autoregressive": two_runs()["autoregressive"]}, split={}))
    assert not (tmp_path / "plots").exists()
    assert "![" not in (tmp_path / "report.md").read_text()


def test_a_damaged_report_is_no_report(tmp_path):
    (tmp_path / "report.json").write_text('{"modes": ')
    with pytest.raises(DataError, match="report.json is not JSON"):
        read_report(tmp_path)


def test_markdown_and_console_say_the_same_figures():
    report = report_of(two_runs([{"prompt": 0, "near_tie": False}]))
    console = rich.console.Console(file=io.StringIO(), width=120)
    console_table(report, console)
    page = markdown(report, ["plots/accept_lengths.png"])
    for text in (console.file.getvalue(), page):
        for said in (
            "2.17",
            "2.25",
            "4.00 ×",
            "1 of 2 (1 UNEXPLAINED)",
            "2 of 2",
            "2000.00 ms",
            "at most 4 tokens",
            "1.02 ×",
        ):
            assert said in text
    assert "| domino | 0.50 (0.50) | 0.33 (0.67) | 0.33 (1.00) |" in page
    assert "![accept lengths](plots/accept_lengths.png)" in page


def test_an_interrupted_run_states_its_sittings():
    assert "Measured in 3 sittings" in markdown(report_of(two_runs(), sittings=3), [])
    assert "sittings" not in markdown(report_of(two_runs()), [])
