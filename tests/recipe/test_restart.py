"""restart.py: what a run that goes on reports of the steps before."""

import json

from domino_jax.recipe import loading, restart
from tests.helpers.recipes import recipe, set_value


def meta(changes=(), data="a"):
    config = recipe()
    for key, value in dict(changes).items():
        set_value(config, key, value)
    return {"config": json.loads(json.dumps(loading.resolved(config))), "data": data, "target": {}}


FINISHED = {"train.steps": 100, "train.learning_rate": 1e-3, "train.warmup_ratio": 0.0}


def test_a_finished_run_that_is_given_more_steps_reports_how_its_schedules_jump():
    [line] = restart.changes(meta(FINISHED), meta(FINISHED | {"train.steps": 200}), 100)
    assert line == (
        "train.steps was 100 and is 200: the learning rate goes on at 5.0e-04 after 2.5e-07, λ at 0.50 after 0.01"
    )


def test_a_schedule_without_lambda_reports_the_rate_alone_and_infinite_ratios_are_read():
    markov = FINISHED | {"drafter.head": "markov"}
    [line] = restart.changes(meta(markov), meta(markov | {"train.learning_rate": 1e-2}), 50)
    assert "train.learning_rate was 0.001 and is 0.01" in line and "λ" not in line
    endless = FINISHED | {"train.lambda_decay_ratio": float("inf")}
    [line] = restart.changes(meta(FINISHED), meta(endless), 50)
    assert line.endswith("λ at 1.00 after 0.51")


def test_the_same_recipe_reports_nothing_and_other_rows_are_named():
    assert restart.changes(meta(), meta({"decode.temperature": 1.0}), 7) == []
    assert restart.changes(meta(), meta(data="b"), 7) == ["the rows are others than those of steps 1 to 7"]


def test_prompts_count_as_held_out_before_only_where_steps_were_saved(tmp_path):
    (tmp_path / restart.HELD_OUT).write_text('{"id": "a", "token_ids": [1, 2]}\n')
    assert restart.held_out_before(tmp_path) is None
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    assert restart.held_out_before(tmp_path) == [{"id": "a", "token_ids": [1, 2]}]
    (tmp_path / restart.HELD_OUT).unlink()
    assert restart.held_out_before(tmp_path) == []
