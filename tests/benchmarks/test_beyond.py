"""studies/beyond.py: its trainings as data, its stages, the sections from recorded figures, and one table whole."""

import ast
import json
import math
import pathlib

import pytest

from assets.make_tiny_target import model_config
from benchmarks.studies import beyond
from benchmarks.studies.beyond import HEADS, TABLES, best_variants, nested_and_alone, small_variants
from benchmarks.studies.beyond_tables import mean_curve, round_cost, steps_to, verdict
from configs import tiny
from domino_jax.method.config import DrafterConfig
from domino_jax.recipe import checks as recipes
from domino_jax.runtime.errors import DominoError
from tests.helpers.paths import ROOT
from tests.helpers.studies import golden_flags, nothing_again, page_of, stand_in

SECTIONS = [*(f"multiscale_{head}" for head in HEADS), "transfer", "best"]


# ----------------------------------------------------------------------------------------------- the trainings


def all_changes():
    found = {}
    for head in HEADS:
        nested, alone = nested_and_alone(head)
        found |= {name: changes for name, changes in (nested, *alone.values())}
    found |= {f"small_{name}": changes for name, changes in small_variants("SOURCE", "BACKBONE").items()}
    options = beyond.parsed(["--workdir=W", "--table=best", "--variant=deep drafter.num_layers=5"])[0]
    return found | {f"best_{name}": changes for name, changes in best_variants(options).items()}


@pytest.mark.parametrize("name", all_changes())
def test_a_training_changes_keys_and_types_of_the_recipe(name):
    config = tiny.get_config()
    for key, value in all_changes()[name].items():
        literal = isinstance(value, str) and (value.startswith("(") or value.isdigit())
        config.update_from_flattened_dict({key: ast.literal_eval(value) if literal else value})
    config.eval.final = False
    recipes.check(config, "train")


def test_the_trainings_at_one_rank_differ_in_the_rank_alone_and_the_nested_one_in_its_scales():
    for head in HEADS:
        (_, nested), alone = nested_and_alone(head)
        assert list(alone) == [16, 32, 64]
        whole = alone[64][1]
        added = {key: nested[key] for key in nested if key not in {*whole, "eval.every"}}
        assert added == {"train.rank_scales": "(0.25,0.5,1.0)"} and nested["eval.every"] == 0
        own = [{key: value for key, value in changes.items() if "rank" not in key} for _, changes in alone.values()]
        if head != "domino":
            assert own[0] == own[1] == own[2] != {}


def test_the_smaller_target_has_a_legal_shape_and_the_tiny_one_is_unchanged():
    small, tiny_target = model_config(1536, 12, 96), model_config(1536)
    shape = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    assert [getattr(small, name) for name in shape] == [12, 96, 3, 1, 288]
    assert [getattr(tiny_target, name) for name in shape] == [24, 128, 4, 2, 384]
    taps = ast.literal_eval(beyond.SMALL_TAPS)
    DrafterConfig.for_target(small, num_layers=3, target_layer_ids=taps, block_size=8, head="none", shift_label=True)


@pytest.mark.parametrize("name", SECTIONS)
def test_the_page_has_a_section_for_each_table(name):
    page = (ROOT / "docs" / beyond.PAGE).read_text()
    assert page.count(f"<!-- beyond {name}: begin -->") == page.count(f"<!-- beyond {name}: end -->") == 1


# -------------------------------------------------------------------------------------------------- the stages

TAUS = {"scratch": 2.0, "tables": 2.5, "backbone": 1.5}


class Commands:
    """In the place of the real commands: writes what they would, with figures known beforehand."""

    def __init__(self):
        self.run = []

    def __call__(self, study, command, title):
        flags = dict(flag.removeprefix("--").split("=", 1) for flag in command[1:])
        self.run.append((title, flags))
        if command[0] == "domino_jax.regenerate":
            pathlib.Path(flags["output"]).write_text("{}\n")
        elif command[0] == "domino_jax.train":
            self.train(pathlib.Path(flags["workdir"]), title, flags)
        elif command[0] == "domino_jax.decode":
            self.decode(pathlib.Path(flags["output"]), title, flags)
        elif command[0] == "benchmarks.studies.drafter_timings":
            self.time(pathlib.Path(flags["output"]), flags)

    def train(self, folder, title, flags):
        (folder / "export").mkdir(parents=True)
        config = DrafterConfig.for_target(
            model_config(1536), num_layers=1, block_size=8, head="domino", shift_label=True, emb_dim=64,
            gru_hidden_dim=128,
        )  # fmt: skip
        (folder / "export" / "config.json").write_text(json.dumps(config.to_dict()))
        name, steps = title.removeprefix("small_").split("_seed")[0], int(flags["config.train.steps"])
        last = TAUS[name] if name in TAUS else 1.75
        every = int(flags["config.eval.every"])
        points = range(every, steps + 1, every) if every else ()
        lines = [{"step": step, "eval_tau": 1 + (last - 1) * step / steps, "seconds": 1.0} for step in points]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def decode(self, folder, title, flags):
        folder.mkdir()
        rank = int(flags["config.decode.head_rank"]) if "config.decode.head_rank" in flags else 64
        tau = 2 + rank / 64 + (1.0 if "deep" in title else 0.0) - (0.5 if "curriculum" in title and rank < 64 else 0.0)
        modes = ["autoregressive", "draft", *(["tree"] if "tree" in flags["config.decode.modes"] else [])]
        same = {mode: {"same": 3, "of": 4, "violations": 0} for mode in modes[1:]}
        report = {"modes": dict.fromkeys(modes, {"tau_pooled": tau}), "identical_outputs": same}
        (folder / "report.json").write_text(json.dumps(report))

    def time(self, file, flags):
        names = [pair.split("=")[0] for pair in flags["runs"].split(",")]
        drafters = {name: timed(120.0 if name == "deep" else 100.0, head=2.0) for name in names}
        file.write_text(json.dumps(timings(**drafters)))


def timed(speed, cost=2.0, head=0.0):
    """The figures of a drafter whose round takes `cost` steps of 2 ms."""
    kinds = {"greedy": {"draft": speed, "tree": speed}, "sampled": {"draft": speed}}
    return {"tokens_per_second": kinds, "split": {"round": 2.0 * cost, "head": head}, "break_even": cost}


def timings(**drafters):
    return {
        "prompts": 24,
        "plain": {"greedy": 90.0},
        "step_ms": 2.0,
        "drafters": drafters,
        "conditions": "It was quiet.",
    }


@pytest.fixture
def commands(monkeypatch):
    return stand_in(monkeypatch, Commands())


def start(tmp_path, *flags):
    return page_of(beyond, tmp_path, "--steps=20", *flags)


def test_one_nested_training_is_decoded_at_each_rank_beside_the_others(tmp_path, commands):
    page = start(tmp_path, "--table=multiscale", "--seeds=0,1", "--config.eval.every=20")
    trained = {title: flags for title, flags in commands.run if "config.train.steps" in flags}
    names = {"domino_nested", "curriculum", "rank16", "rank32"}
    assert set(trained) == {f"{name}_seed{seed}_steps20" for name in names for seed in (0, 1)}
    scales = {title for title, flags in trained.items() if "config.train.rank_scales" in flags}
    assert scales == {"domino_nested_seed0_steps20", "domino_nested_seed1_steps20"}
    decoded = {title: flags for title, flags in commands.run if "config.decode.modes" in flags}
    ranks = {title: flags["config.decode.head_rank"] for title, flags in decoded.items() if "_rank" in title[8:]}
    assert ranks["domino_nested_seed0_steps20_rank16"] == "16" and ranks["curriculum_seed1_steps20_rank32"] == "32"
    assert "config.decode.head_rank" not in decoded["rank16_seed0_steps20_chain"]
    row = next(line for line in page.splitlines() if line.startswith("| 16 |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:4] == ["2.25 ± 0.00", "3.00 ± 0.00", "1.75 ± 0.00"]  # the stub's training at rank 16 has all of it
    # GRU 3·128·(128 + 128), W1 16·(128 + 128), W2 16·1536 numbers of four bytes.
    assert cells[4:6] == ["127.0", "507.9"] and cells[6:] == ["2.00", "4.00", "2.00", "100"]
    timed_runs = next(flags for title, flags in commands.run if title == "timings_multiscale_domino")["runs"]
    assert timed_runs.split(",")[0] == f"16={tmp_path / 'work' / 'rank16_seed0_steps20'}"
    assert "At rank 16 τ of the nested training is 25.0 % below (by seed -25.0, -25.0) that of the training at" in page
    assert "Drafted against plain: 48 of 64 texts are equal; 0 of the others" in page
    assert (tmp_path / "docs" / "beyond_multiscale_domino.png").exists()
    count = len(commands.run)
    assert start(tmp_path, "--table=multiscale", "--seeds=0,1", "--config.eval.every=20").count("## Several") == 1
    assert len(commands.run) == count  # everything is finished


def test_the_tables_of_the_first_target_start_the_second_ones_head(tmp_path, commands):
    page = start(tmp_path, "--table=transfer", "--seeds=0,1")
    stages = dict(commands.run)
    work = tmp_path / "work"
    target = stages["small_training"]
    assert (target["layers"], target["width"]) == ("12", "96") and target["output"] == str(work / "small_target")
    assert stages["small_corpus"]["tokenizer"].endswith("assets/tiny_qwen3")
    assert "config.target.path" not in stages["source_seed0_steps20"]
    for name in ("scratch", "tables", "tables_frozen", "alone_scratch", "alone_tables", "backbone"):
        flags = stages[f"small_{name}_seed1_steps20"]
        assert flags["config.target.path"] == str(work / "small_target")
        assert flags["config.data.train"] == str(work / "small_rows.jsonl") and flags["config.eval.every"] == "2"
        tables = str(work / "source_seed1_steps20") if name.endswith(("tables", "frozen")) else None
        assert flags.get("config.train.head_from") == tables
    assert stages["small_untrained_seed0_steps1"]["config.train.learning_rate"] == "1e-12"
    assert stages["small_tables_frozen_seed0_steps20"]["config.train.frozen_tables"] == "True"
    backbone = stages["small_alone_tables_seed0_steps20"]["config.train.frozen_backbone"]
    assert backbone == str(work / "small_backbone_seed0_steps20")
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in page.splitlines() if line.startswith("| ")}
    scratch = [f"{1 + step / 20:.2f}" for step in range(2, 21, 2)]
    assert [cell.strip() for cell in rows["from scratch"]] == [*scratch, "20"]
    assert rows["with the first target's tables"][-1].strip() == "13"  # 1 + 1.5·s/20 = 2 at 13.3 steps
    assert (
        "with the first target's tables: τ is 25.0 % above (by seed +25.0, +25.0) that from scratch after 20 steps."
        in page
    )


def test_combinations_are_described_by_flags_and_judged_at_equal_cost(tmp_path, commands):
    flags = ["--table=best", "--seeds=0,1", "--width=4"]
    flags += ["--variant=deep drafter.num_layers=5 train.dpace_alpha=0.5", "--variant=same train.gamma=3.0"]
    page = start(tmp_path, *flags)
    stages = dict(commands.run)
    deep, domino = (stages[f"best_{name}_w4_seed0_steps20"] for name in ("deep", "domino"))
    assert deep["config.eval.every"] == domino["config.eval.every"] == "0"
    assert (deep["config.drafter.num_layers"], deep["config.train.dpace_alpha"]) == ("5", "0.5")
    assert deep["config.drafter.block_size"] == domino["config.drafter.block_size"] == "4"
    sampled = stages["best_same_w4_seed1_steps20_T1"]
    assert (sampled["config.decode.seed"], sampled["config.decode.num_drafts"]) == ("1", "3")
    of_times = stages["timings_best_seed1"]
    assert [of_times[key] for key in ("drafts", "nodes", "seed", "count")] == ["3", "16", "1", "24"]
    assert "Plain decoding ran at 90, 90 tokens/s beside the seeds" in page and "It was quiet." in page
    assert "deep beats Domino at equal round cost: τ is 33.3 % above (by seed +33.3, +33.3) and" in page
    assert "same does not beat Domino at equal round cost: τ is equal to (by seed +0.0, +0.0) and" in page
    row = next(
        line for line in page.splitlines() if line.startswith("| deep | drafter.num_layers 5, train.dpace_alpha")
    )
    assert row.endswith(" | 2.00 | 1.00 | 2.00 | 120 | 120 | 120 |")
    assert "| domino | none |" in page and "| same | train.gamma 3.0 |" in page
    assert "--variant='deep drafter.num_layers=5 train.dpace_alpha=0.5'" in page
    count = len(commands.run)
    start(tmp_path, *flags[:-1], "--only=deep", "--variant=other train.gamma=2.0")
    assert len(commands.run) == count
    start(tmp_path, *flags[:-1])  # a variant less: nothing is trained or decoded again, the drafters left are timed
    assert [title for title, _ in commands.run[count:]] == ["timings_best_seed0", "timings_best_seed1"]


def test_what_an_override_says_of_trees_and_drafts_is_timed(tmp_path, commands):
    start(tmp_path, "--table=multiscale", "--config.decode.tree.nodes=32", "--config.decode.num_drafts=5")
    of_times = dict(commands.run)["timings_multiscale_domino"]
    assert (of_times["nodes"], of_times["drafts"]) == ("32", "5")


def test_a_variant_of_a_key_that_no_recipe_has_is_refused_before_anything_runs(tmp_path, commands):
    with pytest.raises(DominoError, match='has no "nun_layers". Did you mean "num_layers"'):
        start(tmp_path, "--table=best", "--variant=deep drafter.nun_layers=5")
    assert not commands.run


def test_a_curve_without_points_is_refused(tmp_path, commands):
    with pytest.raises(DominoError, match="was never evaluated; leave out --config.eval.every"):
        start(tmp_path, "--table=transfer", "--config.eval.every=0")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--table=best"], "give at least one"),
        (["--table=best", "--variant=deep"], "is no name and KEY=VALUE"),
        (["--table=best", "--variant=deep drafter.num_layers"], "is no name and KEY=VALUE"),
        (["--table=best", "--variant=deep 'drafter.num_layers=5"], "is no name and KEY=VALUE"),
        (["--table=transfer", "--variant=deep drafter.num_layers=5"], "--variant is for --table=best, and this is"),
        (["--table=transfer", "--head=markov"], "--head is for --table=multiscale, and this is --table=transfer"),
        (["--table=best", "--variant=domino train.gamma=2.0"], "two drafters are named domino"),
        (["--table=best", "--variant=a train.gamma=2.0", "--variant=a train.gamma=3.0"], "two drafters are named a"),
        (["--seeds=0,1,0"], "0,1,0 names a seed twice"),
        (["--table=multiscale", "--only=rank8"], "choose among domino_nested, rank16, rank32, curriculum"),
    ],
)
def test_a_command_line_without_sense_is_refused(flags, message, capsys):
    with pytest.raises(SystemExit) as left:
        beyond.parsed(["--workdir=W", *flags])
    assert left.value.code == 2 and message in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- figures


def row(*taus):
    return dict.fromkeys(("greedy", "sampled"), [{"tau": tau} for tau in taus])


@pytest.mark.parametrize(
    ("taus", "speed", "cost", "wins"),
    [
        ((4.0, 4.2), 110.0, 2.0, True),
        ((4.0, 4.2), 110.0, 2.04, True),
        ((4.0, 4.2), 110.0, 2.3, False),  # a dearer round
        ((3.1, 3.3), 110.0, 2.0, True),  # each seed against its own, though one is below another's
        ((2.9, 4.2), 110.0, 2.0, False),  # the seeds do not agree
        ((4.0, 4.2), 99.0, 2.0, False),  # slower
    ],
)
def test_domino_is_beaten_at_equal_cost_by_tau_and_by_speed_only(taus, speed, cost, wins):
    times = [timings(it=timed(speed, cost), domino=timed(100.0))] * 2
    said = verdict("it", "domino", {"it": row(*taus), "domino": row(3.0, 3.2)}, times)
    assert said.startswith(f"it {'beats' if wins else 'does not beat'} Domino")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "untimed", [{"it": timed(110.0, cost=0.0)}, {"domino": timed(100.0, cost=0.0)}, {"it": timed(None)}]
)
def test_what_was_too_fast_to_time_with_one_seed_neither_beats_nor_is_beaten(untimed, seed):
    times = [
        timings(**{"it": timed(110.0), "domino": timed(100.0), **(untimed if at == seed else {})}) for at in range(3)
    ]
    said = verdict("it", "domino", {"it": row(4.0, 4.2, 4.1), "domino": row(3.0, 3.2, 3.1)}, times)
    assert said.startswith("it does not beat Domino") and "nan" in said


def test_a_step_too_fast_to_time_has_no_quotient():
    assert math.isnan(round_cost(timings(it={"break_even": None}), "it"))


def test_steps_to_a_goal_are_where_the_line_crosses_it():
    curve = mean_curve([[[10, 1.0], [20, 2.0]], [[10, 2.0], [20, 3.0]]])
    assert curve == [(10, 1.5), (20, 2.5)]
    assert steps_to(curve, 2.0) == 15.0 and steps_to(curve, 1.0) == 10 and steps_to(curve, 2.6) is None


def test_every_table_is_described():
    assert set(TABLES) == set(beyond.OWN_FLAGS) == {name.split("_")[0] for name in SECTIONS}


@pytest.mark.slow(minutes=6)
def test_several_ranks_from_the_first_answer_to_the_section(tmp_path, monkeypatch):
    """The whole table on the golden target: rank 8, few steps; then once more, with nothing to run."""
    monkeypatch.setattr(beyond, "RANK", 8)
    flags = ["--table=multiscale", "--head=markov", "--steps=3", *golden_flags(tmp_path)]
    page = page_of(beyond, tmp_path, *flags)
    assert all(f"| {rank} |" in page for rank in (2, 4, 8)) and "; 0 of the others" in page
    nothing_again(monkeypatch)
    page_of(beyond, tmp_path, *flags)
