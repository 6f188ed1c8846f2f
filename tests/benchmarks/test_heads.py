"""studies/heads.py: its arms as data, its stages, the section made from recorded figures, and all of it once."""

import ast
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.studies import heads, heads_tables
from benchmarks.studies.drafter_decoding import both_temperatures, divergences_of, lane_figures
from benchmarks.studies.drafter_probe import batches, digest, slot_sums
from benchmarks.studies.head_variants import ARMS, variants
from benchmarks.studies.heads_tables import (
    by_place,
    over_flops,
    over_positions,
    positions_section,
    rounds_by_length,
    say_tau,
    section,
)
from benchmarks.studies.study import Study
from configs import tiny
from domino_jax.evals.prompts import Prompt
from domino_jax.method.names import HEADS, NONE
from domino_jax.recipe import checks as recipes
from domino_jax.runtime.errors import DataError, DominoError
from tests.helpers.paths import ROOT
from tests.helpers.studies import golden_flags, nothing_again, page_of, stand_in

# ------------------------------------------------------------------------------------------------ the arms


@pytest.mark.parametrize("name", variants(16))
def test_a_drafter_changes_keys_and_types_of_the_recipe(name):
    one, config = variants(16)[name], tiny.get_config()
    for key, value in one.changes.items():
        tuples = {key: ast.literal_eval(value)} if isinstance(value, str) and value.startswith("(") else {key: value}
        config.update_from_flattened_dict(tuples)
    config.eval.final = False
    recipes.check(config, "train")


def test_every_head_is_compared_and_every_drafter_is_in_an_arm():
    made = variants(16)
    assert {one.changes["drafter.head"] for one in made.values()} == set(HEADS)
    assert {name for arm in ARMS.values() for name in arm.variants} == set(made)
    assert {one.changes["drafter.head"] for name, one in made.items() if name in ARMS["b"].variants} == set(HEADS)


@pytest.mark.parametrize("arm", ARMS)
def test_the_page_has_a_section_for_each_arm(arm):
    for name in ("results.md", "results_positions.md"):
        page = (ROOT / "docs" / name).read_text()
        assert page.count(f"<!-- heads {arm}: begin -->") == page.count(f"<!-- heads {arm}: end -->") == 1


def test_a_frozen_backbone_has_the_layout_of_its_heads():
    made = variants(16)
    for one in made.values():
        if one.backbone:
            backbone = made[one.backbone].changes
            shifted = one.changes["drafter.head"] != "dflash2"
            assert backbone["drafter.head"] == NONE and backbone.get("drafter.shift_label", False) is shifted
            assert backbone["drafter.block_size"] == one.changes["drafter.block_size"]


# -------------------------------------------------------------------------------------------------- figures


def test_recall_and_teacher_forced_lengths_by_hand():
    """Two blocks of two slots over three tokens; the last slot of the second one has no label."""
    base = jnp.array([[[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]], [[1.0, 3.0, 2.0], [9.0, 0.0, 0.0]]])
    final = base.at[0, 1].set(jnp.array([9.0, 0.0, 0.0]))
    labels, weights = jnp.array([[0, 0], [2, 0]]), jnp.array([[1.0, 1.0], [1.0, 0.0]])
    sums = jax.device_get(slot_sums(base, final, labels, weights))
    assert sums["labels"].tolist() == [2.0, 1.0]
    assert sums["recall1"].tolist() == [1.0, 0.0] and sums["recall16"].tolist() == [2.0, 1.0]
    assert sums["correct"].tolist() == [1.0, 1.0]
    assert (sums["accepted"], sums["blocks"]) == (3.0 + 1.0, 2)


def test_rows_are_padded_together_and_their_order_is_in_the_digest():
    rows = [{"token_ids": [5] * size, "loss_mask": [1] * size} for size in (3, 1, 2, 2, 4)]
    first, second = batches(rows)
    assert first["tokens"].shape == second["tokens"].shape == (4, 4)
    assert np.asarray(first["loss_mask"]).sum() == 8 and np.asarray(second["loss_mask"]).sum() == 4
    assert digest(rows) != digest(rows[::-1]) and digest(rows) == digest([dict(row) for row in rows])


def test_seconds_of_a_step_leave_the_compilation_and_other_work_out():
    seconds = [60.0, 62.5, 65.0, 90.0]  # the first interval compiled, and something disturbed the last
    rows = [{"step": 5 * place, "seconds": total} for place, total in enumerate(seconds, 1)]
    assert heads.step_seconds(rows) == 0.5


def test_figures_of_a_lane_by_hand():
    lines = [{"accept_lengths": [1, 3]}, {"accept_lengths": [2]}, {"accept_lengths": []}]
    figures = lane_figures(lines, [{"near_tie": True}, {"near_tie": False}], width=5)
    assert figures["emitted"] == [4, 2, 0] and figures["rounds"] == [2, 1, 0]
    assert figures["histogram"] == {"1": 1, "2": 1, "3": 1, "4": 0, "5": 0}
    assert figures["conditional"] == [2 / 3, 1 / 2, 0.0, None]
    assert figures["identical"] == {"same": 1, "of": 3, "violations": 1}
    assert lane_figures([{"accept_lengths": []}], None, width=5)["histogram"] == {}


def test_divergences_are_divided_by_temperature():
    records = [
        {"sitting": 1},
        {"group": 0, "lanes": {"plain": {"divergences": None}, "draft": {"divergences": [{"prompt": 1}]}}},
        {"group": 1, "lanes": {"plain": {"divergences": None}, "draft": {"divergences": [{"prompt": 2}]}}},
    ]
    assert divergences_of(records, "draft", [0, 2]) == [{"prompt": 2}]
    assert divergences_of(records, "draft", [1, 3]) == [{"prompt": 1}]
    assert divergences_of(records, "plain", [0, 2]) is None


def test_each_prompt_is_asked_once_for_each_temperature_with_the_same_noise():
    prompts = [Prompt(f"p{place}", (1, 2), place) for place in range(2)]
    asked = both_temperatures(prompts, seed=3)
    assert [prompt.id for prompt in asked] == ["p0, greedy", "p0, sampled", "p1, greedy", "p1, sampled"]
    assert [prompt.request.sampling.temperature for prompt in asked] == [0.0, 1.0, 0.0, 1.0]
    assert [(prompt.request.noise, prompt.request.seed) for prompt in asked] == [(0, 3), (0, 3), (1, 3), (1, 3)]


def test_the_points_of_a_run_are_its_planned_checkpoints_and_its_end():
    chain = {"emitted": [6, 2, 50], "rounds": [2, 2, 5]}
    decoded = {"greedy": {"modes": {"draft": chain}}}
    probe = {"curve": [[10, 30, 20], [13, 9, 3], [20, 35, 20]], "curve_prompts": 2, "decoded": decoded}
    points = heads.curve_of(probe, flops=2.0, steps=30)
    assert points == [[20.0, 1.5], [40.0, 1.75], [60.0, 2.0]]  # step 13 was an interruption


def test_steps_for_equal_predictions(tmp_path, monkeypatch):
    each = {"domino": 300.0, "markov_rnn": 302.0, "eagle3": 900.0, "dflash2": 280.0}

    def train(self, name, one, seed):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"step": 1, "predictions": each[name]}) + "\n")
        return tmp_path / name

    monkeypatch.setattr(heads.Comparison, "train", train)
    options, _ = heads.parsed(["--workdir=w", "--arm=d", "--steps=90"])
    comparison = heads.Comparison(Study(tmp_path), options)
    found = heads.by_predictions(comparison, {name: variants(16)[name] for name in each})
    assert {name: one.steps for name, one in found.items()} == {
        "domino": 90,
        "markov_rnn": 90,
        "eagle3": 30,
        "dflash2": 96,
    }


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--width=1", "1 is not a whole number of 2 or more"),
        ("--steps=0", "0 is not a whole number of 1 or more"),
        ("--steps=-3", "-3 is not a whole number of 1 or more"),
        ("--prompts=0", "0 is not a whole number of 1 or more"),
        ("--seeds=0,-1", "-1 is not a whole number of 0 or more"),
        ("--train_seconds=-1", "-1 is not a time of 0 or more"),
        ("--minutes=nan", "nan is not a time of 0 or more"),
    ],
)
def test_numbers_out_of_range_are_refused(flag, message, capsys):
    with pytest.raises(SystemExit) as left:
        heads.parsed(["--workdir=w", flag])
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_timings_alone_need_a_finished_arm(tmp_path):
    with pytest.raises(DominoError, match="run the arm without --only_timings first"):
        heads.main([f"--workdir={tmp_path}", "--only_timings"])


# ------------------------------------------------------------------------------------- the section, exactly


def lane(emitted, rounds):
    return {
        "emitted": emitted,
        "rounds": rounds,
        "histogram": {"1": 1, "2": 3} if sum(rounds) else {},
        "conditional": [0.75, 0.5, None] if sum(rounds) else [],
        "identical": {"same": 2, "of": 2, "violations": 0} if sum(rounds) else None,
    }


def seed(scale, blocks=True):
    emitted = [6 * scale, 2 * scale]
    modes = {"autoregressive": lane([0, 0], [0, 0]), "draft": lane(emitted, [2, 2]), "tree": lane(emitted, [1, 2])}
    if blocks:
        modes |= {"backbone": lane(emitted, [4, 4]), "published": lane(emitted, [2, 2])}
    probe = {"recall": {"1": [0.5, 0.25, 0.125], "16": [1.0, 0.75, 0.5]}, "accept_len": 2.5}
    return {
        "steps": 30,
        "flops": 2e12,
        "train_bytes": 64_000_000,
        "predictions": 3e6,
        "teacher_forced": 3.25,
        "curve": [[1e12, 1.5], [2e12, 2.0]],
        "trained": 1_500_000,
        "stored": 1_500_000,
        "draft_bytes": 4_000_000,
        "blocks": probe if blocks else None,
        "published": 3 if blocks else 0,
        "greedy": {"modes": modes, "plain": "abc"},
        "sampled": {"modes": modes, "plain": "def"},
    }


def timed(*modes):
    rates = {"draft": 200.0, "tree": 150.0}
    return {
        "tokens_per_second": {"greedy": {mode: rates[mode] for mode in modes}, "sampled": {"draft": 120.0}},
        "split": {"draft": 0.5, "head": 0.25, "verify": 3.0, "commit": 0.125, "round": 4.0},
        "break_even": 2.0,
        "peak_bytes": 21_000_000,
    }


def recorded():
    drafters = {
        "domino": {"title": "Domino", "colour": "#000000", "seeds": [seed(1), seed(2)]},
        "eagle3": {"title": "EAGLE-3", "colour": "#111111", "seeds": [seed(1, False), seed(1, False)]},
    }
    for each in drafters["eagle3"]["seeds"]:
        del each["greedy"]["modes"]["tree"]  # the same object as at temperature 1
    rows = {"training": {"count": 1000, "sha256": "0123456789abcdef99"}, "held_out": {"count": 2, "sha256": "f" * 64}}
    return {
        "arm": "b",
        "width": 4,
        "steps": 30,
        "seeds": [0, 1],
        "prompts": 2,
        "rows": rows,
        "oracle": 3.75,
        "command": "python -m benchmarks.studies.heads --workdir=WORKDIR --arm=b",
        "conditions": "A processor, 2 cores.",
        "timings": {
            "prompts": 24,
            "plain": {"greedy": 100.0, "sampled": 80.0},
            "step_ms": 2.0,
            "conditions": "It was quiet.",
            "drafters": {"domino": timed("draft", "tree"), "eagle3": timed("draft")},
        },
        "drafters": drafters,
    }


EXPECTED = (
    "| Domino | 3.25 | 2.50 | 3.00 ± 1.00 [1.50, 4.50] | 3.00 ± 1.00 [1.50, 4.50] | "
    "3.00 [1.50, 4.50] | 3.00 [1.50, 4.50] | 1.50 ± 0.50 | "
    "4.00 ± 1.33 [1.50, 9.00] | 4.00 ± 1.33 [1.50, 9.00] | 3.00 (3) |"
)


def test_the_section_of_recorded_figures():
    text = section(recorded(), ARMS["b"])
    lines = text.splitlines()
    assert lines[0] == "## Everything trained, equal steps"
    assert EXPECTED in lines
    assert "| Domino | 1.50 | 1.50 | 30 | 3.00 | 2.00 | 64 |" in lines
    eagle = next(line for line in lines if line.startswith("| EAGLE-3 | 3.25"))
    assert eagle.split(" | ")[2] == "–" and eagle.endswith("| – |")  # no blocks, no other depth
    times = "0.50 | 0.25 | 3.00 | 0.12 | 4.00 | 2.00"
    assert f"| Domino | 4.00 | 21 | {times} | 200 | 150 | 2.00 | 1.50 | 1.50 |" in lines
    assert f"| EAGLE-3 | 4.00 | 21 | {times} | 200 | – | 2.00 | – | 1.50 |" in lines
    assert "[a separate page](results_positions.md)" in text
    assert "- Plain against plain: 4 of 4 greedy plain decodings gave the same texts." in lines
    assert "- Oracle: with every draft accepted τ is 3.75 of at most 4; ends of texts cut the last rounds." in lines
    assert "so every τ is at most 4." in text and "Training seeds: 0, 1 (mean ± half the range" in text
    assert "A plain step takes 2.00 ms; plain decoding does 100 tokens/s at temperature 0 and 80 at 1. Tokens/s" in text
    assert "Tokens/s are of 24 prompts. It was quiet." in text
    assert (
        "Training rows: 1,000, the target's own answers (SHA-256 of their token ids in order 0123456789abcdef)" in text
    )
    assert text.endswith("held-out prompts: 2 (ffffffffffffffff). A processor, 2 cores.\n")


def test_the_section_by_position():
    lines = positions_section(recorded(), ARMS["b"]).splitlines()
    assert lines[0] == "## Everything trained, equal steps"
    assert all(f"| Domino | accepted, T = {place} | 0.75 | 0.50 | – | – |" in lines for place in (0, 1))
    assert "| Domino | rounds, T = 0 | 0.25 | 0.75 | – | – |" in lines
    assert "| Domino | recall@16 | 1.00 | 0.75 | 0.50 | – |" in lines
    assert not any(line.startswith("| EAGLE-3 | recall") for line in lines)


def test_plain_decodings_that_differ_are_counted():
    changed = recorded()
    changed["drafters"]["eagle3"]["seeds"][1]["greedy"]["plain"] = "other"
    assert "Plain against plain: 3 of 4 greedy plain decodings" in section(changed, ARMS["b"])


def test_one_seed_has_no_range_and_one_prompt_no_interval():
    only = seed(1)
    only["greedy"]["modes"]["draft"] = lane([6], [2])
    assert say_tau([only], "greedy", "draft") == "3.00"


def test_places_that_no_seed_reached_are_left_out():
    assert by_place([[0.5, None], [1.0, 0.5, None]]) == [0.75, 0.5]


def test_the_pictures_have_a_line_for_each_drafter():
    figure = over_flops(recorded()["drafters"])
    assert [line.get_label() for line in figure.axes[0].lines] == ["Domino", "EAGLE-3"]


def test_a_drawn_share_is_of_enough_rounds(monkeypatch):
    drafters = recorded()["drafters"]
    lengths = rounds_by_length(drafters["domino"]["seeds"], "greedy")
    reached = [sum(count for length, count in lengths.items() if length >= place) for place in (1, 2)]
    assert reached[0] > reached[1] > 0

    def drawn():
        return [len(line.get_ydata()) for line in over_positions(drafters).axes[0].lines]

    for fewest, places in ((reached[1], 2), (reached[1] + 1, 1)):
        monkeypatch.setattr(heads_tables, "FEWEST_ROUNDS", fewest)
        assert drawn()[0] == places
    monkeypatch.setattr(heads_tables, "FEWEST_ROUNDS", reached[0] + 1)
    assert not drawn()


# ------------------------------------------------------------------------------------------------ the stages


def test_a_backbone_comes_before_its_heads_and_is_run_for_one_that_is_named_alone():
    made = variants(16)
    assert heads.with_backbones(made, ["markov_rnn_frozen"]) == ["backbone_shifted", "markov_rnn_frozen"]
    assert heads.with_backbones(made, ["domino", "dflash2"]) == ["domino", "dflash2"]


def test_a_held_out_prompt_among_the_training_prompts_is_refused(tmp_path, monkeypatch):
    rows = [{"token_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}, {"token_ids": [4, 5], "loss_mask": [0, 1]}]

    def execute(study, command, name):
        own = rows if name == "regenerate" else rows[1:]
        path = next(flag for flag in command if flag.startswith("--output=")).split("=", 1)[1]
        with open(path, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in own)

    stand_in(monkeypatch, execute)
    with pytest.raises(DataError, match="1 prompts of .* are training prompts as well"):
        heads.main([f"--workdir={tmp_path}", "--arm=b"])


@pytest.mark.slow(minutes=4)
@pytest.mark.parametrize(
    ("arm", "names"),
    [("a", ("none", "dflash2_frozen")), ("c", ("domino", "eagle3")), ("c", ("medusa",))],
)
def test_an_arm_from_the_first_answer_to_the_section(tmp_path, monkeypatch, arm, names):
    """Some of an arm's drafters on the golden target, blocks of 4, few steps; then once more, with nothing to run."""
    own = {"drafter__gru_hidden_dim": 16, "drafter__emb_dim": 8, "drafter__selector_rank": 8, "decode__tree__lanes": 4}
    if names == ("medusa",):
        own["drafter__target_layer_ids"] = None
    monkeypatch.setattr(heads, "PILOT_STEPS", 20)
    monkeypatch.setitem(ARMS, arm, dataclasses.replace(ARMS[arm], variants=names))
    flags = [f"--arm={arm}", "--width=4", "--steps=3", "--train_seconds=0.1", *golden_flags(tmp_path, **own)]
    page = page_of(heads, tmp_path, *flags)
    made = variants(4)
    assert all(f"| {made[name].title} |" in page for name in names)
    assert "differ by more than a near tie" in page and "; 0 of the others" in page
    for picture in ("flops", "positions"):
        assert (tmp_path / "docs" / f"heads_{picture}_{arm}.png").exists()
    execute, stages = Study.execute, []
    nothing_again(monkeypatch)
    assert page_of(heads, tmp_path, *flags).splitlines()[:20] == page.splitlines()[:20]

    def only_timings(self, command, name):
        stages.append(name)
        execute(self, command, name)

    stand_in(monkeypatch, only_timings)
    page_of(heads, tmp_path, *flags, "--only_timings")
    assert stages == [f"timings_{arm}"]
