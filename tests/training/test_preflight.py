"""preflight.py: what would waste a run is reported with file and line, or stops it before the first step."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from domino_jax.data.chat import Row
from domino_jax.models.sharding import make_mesh
from domino_jax.runtime.connection import free_port
from domino_jax.runtime.errors import DataError
from domino_jax.training import estimates, preflight
from domino_jax.training.estimates import Plan
from domino_jax.training.preflight import Sampled, run_preflight
from domino_jax.weights.drafter import load_drafter
from domino_jax.weights.loading import load_target
from tests.helpers.paths import ROOT

GOLDEN = ROOT / "tests" / "golden" / "tied_shift"
CASES = json.loads((GOLDEN / "golden.json").read_text())["generate"]
PLAN = Plan(steps=100, batch_size=4, max_length=144, num_anchors=8, layout="pad", scored_rows=6, seed=0)
ONE = make_mesh(1, 1, 1, jax.devices()[:1])


class RowList:
    """Training rows from a list, with the interface of data.pipeline's."""

    def __init__(self, rows, num_skipped=0):
        self.rows = [Row(np.asarray(ids, np.int32), np.asarray(mask, np.float32)) for ids, mask in rows]
        self.num_skipped = num_skipped
        self.num_read = len(rows) + num_skipped
        self.num_tokens = sum(len(row.token_ids) for row in self.rows)
        self.num_supervised = int(sum(row.loss_mask.sum() for row in self.rows))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return 10 + index, self.rows[index]

    def where(self, row_id):
        return f"rows.jsonl:{row_id - 9}"


def own_rows():
    """The golden target's own answers: rows.jsonl:1 to 4."""
    return [(case["prompt"] + case["output"], [0] * len(case["prompt"]) + [1] * len(case["output"])) for case in CASES]


def foreign_row(seed):
    """An answer that nobody's model gave."""
    ids = np.random.default_rng(seed).integers(0, 200, 60).tolist()
    return ids, [0] * 20 + [1] * 40


@pytest.fixture(scope="module")
def target():
    return load_target(str(GOLDEN / "target"), "float32")


@pytest.fixture(scope="module")
def drafter(target):
    return load_drafter(GOLDEN / "drafter", target.model.config, np.dtype("float32"))[0]


@pytest.fixture(scope="module")
def found(target, drafter, tmp_path_factory):
    """(what was found in 4 own and 2 foreign rows, the workdir)."""
    workdir = tmp_path_factory.mktemp("run") / "new"
    rows = RowList([*own_rows(), foreign_row(0), foreign_row(1)], num_skipped=2)
    inputs = {"rows": rows, "fingerprint": "f1", "loaded": target, "drafter": drafter, "plan": PLAN, "mesh": ONE}
    return run_preflight(workdir, **inputs), workdir


def with_rows(target, drafter, tmp_path, rows, **changes):
    plan = dataclasses.replace(PLAN, **changes)
    inputs = {"rows": RowList(rows), "fingerprint": "f", "loaded": target, "drafter": drafter, "plan": plan}
    return run_preflight(tmp_path, **inputs, mesh=ONE)


# ------------------------------------------------------------------------------------------------------ the whole


def test_answers_of_somebody_else_and_rows_without_an_anchor_are_reported_with_a_remedy(found):
    scores, data = found[0]["target_logprob"], found[0]["data"]
    assert {one["where"] for one in scores["low"]} == {"rows.jsonl:5", "rows.jsonl:6"}
    assert scores["num_low"] == 2 and scores["rows"] == 6 and scores["threshold"] == -2.0
    foreign, empty = found[0]["warnings"]
    assert "hardly give 2 of 6 sampled answers" in foreign and "rows.jsonl:5 (-" in foreign
    assert "python -m domino_jax.regenerate" in foreign
    assert data["fraction_without_anchor"] == 0.25 and "2 of 8 rows have no two supervised tokens" in empty


def test_json_holds_what_was_returned_and_markdown_the_figures(found):
    result, workdir = found
    assert json.loads((workdir / "preflight.json").read_text()) == result
    message = (workdir / "preflight.md").read_text()
    for part in ("| mask token | 259", "25.0% have no anchor", "**Warning:**", "[["):
        assert part in message


def test_supervised_and_all_tokens_are_those_of_the_rows(found):
    data = found[0]["data"]
    tokens = sum(len(case["prompt"]) + len(case["output"]) for case in CASES) + 120
    supervised = sum(len(case["output"]) for case in CASES) + 80
    assert (data["tokens"], data["supervised_tokens"], data["fingerprint"]) == (tokens, supervised, "f1")
    assert data["supervised_fraction"] == supervised / tokens


@pytest.mark.parametrize(
    ("console", "part"),
    [
        ({"width": 40}, "plain [[message]]\n"),
        ({"force_terminal": True, "color_system": "standard"}, "\x1b[32m[[message]]"),
    ],
    ids=["a log", "a terminal, in colour"],
)
def test_the_findings_are_printed_with_the_supervised_part_in_brackets(found, console, part):
    console = rich.console.Console(**console)
    with console.capture() as shown:
        preflight.show(found[0], ["plain ", "[[message]]"], console)
    assert part in shown.get() and ("\x1b" in shown.get()) == console.is_terminal
    assert "  target layers: [" in shown.get() and "warning: the target would hardly give" in shown.get()


# ------------------------------------------------------------------------------------------------------ what is fatal


def test_a_mask_token_in_the_text_stops_the_run(target, drafter, tmp_path):
    ids, mask = own_rows()[1]
    rows = [own_rows()[0], ([*ids[:5], drafter.mask_token_id, *ids[6:]], mask)]
    with pytest.raises(
        DataError, match="rows.jsonl:2: the row has the mask token 259 in its text, as 1 of 2"
    ) as stopped:
        with_rows(target, drafter, tmp_path, rows)
    assert len(str(stopped.value).splitlines()) <= 5 and not (tmp_path / "preflight.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": 260}, "mask_token_id 260 is not a row"),
        ({"target_layer_ids": (1, 5)}, "target_layer_ids hold \\[5\\], but the target has layers 0..5"),
        ({"target_layer_ids": (1, 9)}, "target_layer_ids hold \\[9\\]"),
    ],
)
def test_ids_that_the_target_does_not_have_stop_the_run(target, drafter, tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        with_rows(target, dataclasses.replace(drafter, **change), tmp_path, own_rows())


def test_a_target_whose_logits_are_not_finite_stops_the_run():
    sample = [Sampled("a:1", None), Sampled("a:2", None)]
    with pytest.raises(DataError, match="a:2: the target's log-probability of the answer is nan"):
        preflight.describe_scores(sample, np.array([-1.0, np.nan]))


# ------------------------------------------------------------------------------------------------------ the target


def test_a_rows_score_is_the_mean_over_its_supervised_tokens_whatever_slices_padding_and_batch(target, monkeypatch):
    """The first token is supervised as well, and with nothing before it does not count."""
    rows = [Row(np.asarray(ids, np.int32), np.asarray([1, *mask[1:]], np.float32)) for ids, mask in own_rows()]
    whole = preflight.mean_logprobs(target.model, target.params, rows, 144, ONE)
    ids, mask = rows[0].token_ids, rows[0].loss_mask
    logits = jax.jit(target.model.apply)({"params": target.params}, jnp.asarray([ids]))["logits"][0]
    every = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(whole[0], every[mask[1:] > 0].mean(), rtol=1e-5)
    monkeypatch.setattr(preflight, "SCORED_TOKENS", 400)  # two rows at a time
    cut = preflight.mean_logprobs(target.model, target.params, rows[:3], 200, ONE)
    np.testing.assert_allclose(cut, whole[:3], rtol=1e-5)


def test_no_array_of_all_logits_lives(target):
    vocab = target.model.config.vocab_size
    jaxpr = jax.make_jaxpr(
        lambda tokens, mask: preflight.supervised_logprob(target.model, target.params, tokens, mask)
    )(jnp.zeros((2, 400), jnp.int32), jnp.ones((2, 400)))
    wide = [
        variable.aval.shape
        for equation in all_equations(jaxpr.jaxpr)
        for variable in equation.outvars
        if variable.aval.ndim == 3 and variable.aval.shape[-1] == vocab
    ]
    assert wide and set(wide) == {(2, preflight.SLICE_TOKENS, vocab)}


def all_equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                inner = inner.jaxpr if hasattr(inner, "jaxpr") else inner
                if hasattr(inner, "eqns"):
                    yield from all_equations(inner)


def test_no_rows_to_score_is_no_pass_of_the_target(target, drafter, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "mean_logprobs", lambda *_: pytest.fail("nothing was to be scored"))
    found = with_rows(target, drafter, tmp_path, own_rows(), scored_rows=0)
    assert found["target_logprob"] is None
    assert json.loads((tmp_path / "preflight.json").read_text())["target_logprob"] is None


# ------------------------------------------------------------------------------------------------------ the example


class Letters:
    """Ids are letters, 0 being a."""

    def decode(self, ids, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(chr(97 + token) for token in ids)


def test_the_supervised_part_of_a_row_stands_in_brackets():
    row = Row(np.arange(6, dtype=np.int32), np.asarray([0, 1, 1, 0, 0, 1], np.float32))
    assert preflight.marked(row, Letters()) == ["a", "[[bc]]", "de", "[[f]]"]
    assert "".join(preflight.marked(row, None)) == "0 [[1 2 ]]3 4 [[5 ]]"


def test_a_long_part_is_shown_without_its_middle():
    row = Row(np.asarray([0] * 300 + [1] * 1_000 + [2] * 300, np.int32), np.ones(1_600, np.float32))
    assert preflight.marked(row, Letters()) == [f"[[{'a' * 300} … 1,000 characters … {'c' * 300}]]"]


def test_the_sample_is_the_same_everywhere_and_without_doubles():
    rows = RowList([([place, 0], [0, 1]) for place in range(40)])
    one, two = (preflight.draw(rows, 25, seed=3) for _ in range(2))
    assert [entry.where for entry in one] == [entry.where for entry in two]
    assert len({entry.where for entry in one}) == 25
    assert len(preflight.draw(rows, 99, seed=3)) == 40


# ------------------------------------------------------------------------------------------------------ estimates


def shape(*sizes, spec=None, mesh=None):
    sharding = NamedSharding(mesh, PartitionSpec(*spec)) if mesh is not None else None
    return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=sharding)


def test_bytes_of_a_device_follow_the_shardings():
    mesh = AbstractMesh((2, 4, 2), ("data", "fsdp", "tensor"))
    tree = {"a": shape(16, 8, spec=("fsdp", "tensor"), mesh=mesh), "b": shape(10, spec=(), mesh=mesh), "c": shape(3)}
    assert estimates.device_bytes(tree) == 4 * (4 * 4 + 10 + 3)


@pytest.mark.parametrize(
    ("layout", "rows", "epochs"), [("pad", 400, 8.0), ("buckets", 400, 8.0), ("pack", 1_600, 32.0)]
)
def test_steps_become_rows_tokens_and_epochs(target, drafter, layout, rows, epochs):
    plan = dataclasses.replace(PLAN, layout=layout)
    message = estimates.run_length(target.model.config, drafter, plan, 50, 50 * 36, 1)
    assert (message["rows"], message["tokens"], message["epochs"]) == (rows, rows * 36, epochs)
    assert message["hours"] is None  # a CPU's peak is in no list


def test_hours_are_flops_over_the_peak_of_all_devices(target, drafter, monkeypatch):
    monkeypatch.setattr(estimates, "peak_flops", lambda kind: 1e12)
    monkeypatch.setattr(estimates, "step_flops", lambda *_, **__: {"lean": 3e12})
    message = estimates.run_length(target.model.config, drafter, PLAN, 50, 1_800, 8)
    assert message["hours"] == pytest.approx(100 * 4 * 3e12 / (8 * 1e12 * 0.4) / 3600)


def test_rows_longer_than_the_positions_of_the_target_are_reported(found):
    warnings = " ".join(preflight.warnings(found[0], dataclasses.replace(PLAN, max_length=2_000), 1_024))
    assert "data.max_length 2000 is beyond the target's max_position_embeddings 1024" in warnings


# ------------------------------------------------------------------------------------------------------ many devices

ON_A_MESH = """
import sys, json
from domino_jax.runtime import distributed
distributed.initialize("auto")
import jax
sys.path.insert(0, ".")
from tests.training import test_preflight as t
from domino_jax.models.sharding import make_mesh, placement
from domino_jax.weights.drafter import load_drafter
from domino_jax.weights.loading import read_target_config
mesh = make_mesh(1, 2, 2)
kv_heads = read_target_config(t.GOLDEN / "target").num_key_value_heads
loaded = t.load_target(str(t.GOLDEN / "target"), "float32", placement(mesh, kv_heads))
drafter = load_drafter(t.GOLDEN / "drafter", loaded.model.config, "float32")[0]
rows = t.RowList([*t.own_rows(), t.foreign_row(0)])
inputs = dict(rows=rows, fingerprint="f", loaded=loaded, drafter=drafter, plan=t.PLAN, mesh=mesh)
found = t.run_preflight(sys.argv[1], **inputs)
print("SCORES", json.dumps(found["target_logprob"]), flush=True)
distributed.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_scores_are_the_same_on_a_mesh_and_in_every_process(target, drafter, tmp_path, processes):
    rows = [*own_rows(), foreign_row(0)]
    alone = with_rows(target, drafter, tmp_path / "alone", rows)["target_logprob"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(4 // processes)}
    environment |= {"PYTHONPATH": str(ROOT)}
    if processes > 1:
        address = f"127.0.0.1:{free_port()}"
        environment |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
    argv = [sys.executable, "-c", ON_A_MESH, str(tmp_path / "mesh")]
    running = [
        subprocess.Popen(
            argv,
            cwd=ROOT,
            env=environment | ({"JAX_PROCESS_ID": str(index)} if processes > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(processes)
    ]
    message = [process.communicate(timeout=300)[0] for process in running]
    for text in message:
        (line,) = [line for line in text.splitlines() if line.startswith("SCORES ")] or pytest.fail(text)
        scores = json.loads(line.removeprefix("SCORES "))
        assert scores["mean"] == pytest.approx(alone["mean"], rel=1e-5)
        assert [one["where"] for one in scores["low"]] == ["rows.jsonl:5"]
    assert sum("pre-flight" in text for text in message) == 1
