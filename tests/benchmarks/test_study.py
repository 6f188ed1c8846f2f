"""benchmarks/studies: every training is a recipe, a stage runs once, and figures of several seeds become one row."""

import argparse
import ast

import pytest

from benchmarks.studies import heads
from benchmarks.studies.figures import envelope, figures_of, group_rows, leads, pair_rows
from benchmarks.studies.study import Study, Variant, with_best_rates
from configs import tiny
from domino_jax.method.drafters import CONFIGS
from domino_jax.recipe import rules
from domino_jax.runtime.errors import DominoError

WORKER = """
import pathlib, sys
values = dict(flag.lstrip("-").split("=", 1) for flag in sys.argv[1:])
with open(values["output"], "a") as file:
    file.write("x")
print("last words")
sys.exit(int(values["config.code"]))
"""


@pytest.mark.parametrize("one", [*heads.HEADS.values(), *heads.PARTS.values()], ids=lambda one: one.title)
def test_a_training_changes_keys_and_types_of_the_recipe(one):
    config = tiny.get_config()
    for key, value in one.changes.items():
        parsed = ast.literal_eval(value) if isinstance(value, str) and value.startswith("(") else value
        config.update_from_flattened_dict({key: parsed})
    config.eval.final = False
    rules.check(config, "train", frozenset(one.changes))


def test_every_head_is_compared():
    assert {one.changes["drafter.head"] for one in heads.HEADS.values()} == set(CONFIGS)


def test_a_stage_that_ended_well_runs_again_only_with_other_flags(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    study, output = Study(tmp_path / "work"), tmp_path / "starts"
    with pytest.raises(DominoError, match="stage left with exit code 3; .*stage.log ends:\nlast words"):
        study.run("stage", "worker", {"output": output}, {"code": 3})
    for code_and_starts in ((0, "xx"), (0, "xx"), ("00", "xxx")):
        study.run("stage", "worker", {"output": output}, {"code": code_and_starts[0]})
        assert output.read_text() == code_and_starts[1]


def evaluation(first, second, interval):
    """An evaluation of two drafters: their τ at 4 drafts, and the interval of the difference."""
    drafters = {
        name: {"tau": {"1": 1.5, "4": tau}, "intervals": {"1": None, "4": [tau - 0.1, tau + 0.1]}, "tau_backbone": None}
        for name, tau in (("a", first), ("b", second))
    }
    for figures in drafters.values():
        figures["accept_by_position"] = [0.5]
    return {"drafters": drafters, "pairs": {("a", "b"): {"4": {"difference": first - second, "interval": interval}}}}


def test_a_difference_is_real_where_every_seed_and_the_interval_over_seeds_say_so():
    sure, other = evaluation(2.5, 2.0, [0.3, 0.7]), evaluation(2.25, 2.0, [-0.1, 0.4])
    alone = {"difference": 0.5, "low": 0.3, "high": 0.7, "seeds_low": None, "seeds_high": None, "real": True}
    assert leads([sure], ("a", "b"))["4"] == alone
    assert not leads([sure, other], ("a", "b"))["4"]["real"]
    assert envelope([[0.3, 0.7], None]) == (None, None)
    # Three equal seeds leave the variance of the answers, 0.4 / 3.92, with Student's t of two degrees of freedom.
    three = leads([sure] * 3, ("a", "b"))["4"]
    assert three["seeds_low"] == pytest.approx(0.5 - 4.303 * 0.4 / 3.92, abs=1e-4) and three["real"]
    # Every seed is sure, but they differ too much for their mean to be.
    apart = leads([sure, evaluation(4.5, 2.0, [2.3, 2.7]), sure], ("a", "b"))["4"]
    assert apart["low"] == 0.3 and apart["seeds_low"] < 0 and not apart["real"]
    row = figures_of("b", {0: [sure], 1: [sure, other]})
    assert row["tau_t0"] == "2.00 (1.90 to 2.10)" and row["lead_t0"] == "**+0.50** (+0.30 to +0.70)"
    assert row["tau_t1"] == "2.00 ± 0.00 (1.90 to 2.10)" and row["lead_t1"].startswith("+0.38 (-")
    assert row["accept_1_t0"] == 0.5 and row["tau_1_t1"] == 1.5 and row["low_1_t1"] is None
    [pair] = pair_rows({"a": "A", "b": "B"}, {0: [sure]})
    assert (pair["first"], pair["second"], pair["temperature"], pair["drafts"], pair["real"]) == ("A", "B", 0, 4, True)


@pytest.mark.parametrize(
    "taus, tried, best",
    [((1, 2, 3), [2, 1, 3], 3), ((1, 3, 2), [2, 1, 3], 2), ((3, 2, 1), [2, 1], 1)],
)
def test_learning_rates_are_tried_from_the_middle_as_long_as_they_gain(monkeypatch, taus, tried, best):
    study = Study.__new__(Study)
    trained = []
    monkeypatch.setattr(study, "train", lambda name, one, *_: trained.append(one.changes["train.learning_rate"]))
    figures = lambda name, *_: {"drafters": {"a": {"tau": {"7": taus[trained[-1] - 1]}}}}  # noqa: E731
    monkeypatch.setattr(study, "evaluate", figures)
    variants = {"a": Variant("A", {}), "deep": Variant("Deep", {"drafter.num_layers": 4}, rate_of="a")}
    options = argparse.Namespace(rates=[1, 2, 3], seeds=[0], steps=2)
    chosen, rows = with_best_rates(study, variants, options)
    assert trained == [row["learning_rate"] for row in rows] == tried
    assert chosen["a"].changes == {"train.learning_rate": best}
    assert chosen["deep"].changes == {"drafter.num_layers": 4, "train.learning_rate": best}
    assert chosen["deep"].trained_as == f"deep_lr{best}"


def test_tau_of_a_group_counts_the_rounds_of_its_tasks():
    tasks = {"hint, 0": {"tau": {"1": 1.0, "4": 2.0}}, "hint, 64": {"tau": {"1": 1.0, "4": 4.0}}}
    tasks["word, 64"] = {"tau": {"1": 1.0, "4": 1.0}}
    tokens = {0: dict(zip(tasks, (8, 8, 2), strict=True))}
    rows = group_rows({"a": "A"}, {0: [{"drafters": {"a": {"tasks": tasks}}}]}, tokens)
    # 8 tokens in 4 rounds, 8 in 2, 2 in 2.
    expected = {"hint": 16 / 6, "word": 1.0, "0": 2.0, "64": 10 / 4}
    assert {row["group"]: row["tau"] for row in rows} == expected
    assert all(row["low"] == row["tau"] == row["high"] for row in rows)
