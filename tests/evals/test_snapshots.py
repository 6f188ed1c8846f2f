"""The texts of a run for people: tables, model cards and report.html, as in tests/snapshots (pytest --update)."""

import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from domino_jax.evals import model_card, report, tables
from domino_jax.evals.page import page_of
from domino_jax.method.config import DrafterConfig
from domino_jax.runtime import sizes
from domino_jax.weights.drafter import load_drafter
from tests.helpers.golden_files import target_config
from tests.helpers.paths import GOLDEN
from tests.helpers.report_runs import RECIPE, report_of, two_runs

ELSEWHERE = {"device": "DEVICE", "date": "DATE", "versions": {"jax": "VERSION"}}
DIVERGED = [{"prompt": 0, "near_tie": True}, {"prompt": 1, "near_tie": False}]


def whole_report():
    """Two modes, two tasks, a batch size of 8."""
    speeds, counts = {"autoregressive": (1234.6, 1.0), "domino": (2469.2, 2.0)}, {"same": 3, "of": 4}
    level = {
        mode: {"tokens_per_second": speed, "speedup": gain, "drafts_per_round": 2.504}
        | {"identical": {**counts, "near_ties": 1, "violations": 0}}
        for mode, (speed, gain) in speeds.items()
    }
    tasks = {task: two_runs() for task in ("gsm8k", "mbpp")}
    return report_of(two_runs(DIVERGED), tasks=tasks, concurrency={"8": level}) | ELSEWHERE


def rows_as_text(rows) -> str:
    return "".join(" | ".join(row) + "\n" for row in rows)


def on_console(shown) -> str:
    printed = rich.console.Console(file=io.StringIO(), width=120)
    report.console_table(shown, printed)
    return printed.file.getvalue()


def deeper_tree() -> dict:
    """A chain beside a tree that has one position more."""

    def rates(*values):
        return {"accept_rate_by_position": list(values), "conditional_accept_rate_by_position": [0.5] * len(values)}

    return {"autoregressive": rates(), "domino": rates(0.5), "tree": rates(0.6, 0.3)}


def parameter_line() -> str:
    """The line of a training about its parameters, here over a mesh of 8 devices."""
    mesh = jax.sharding.AbstractMesh((2, 4, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    specs = {"a": ("fsdp", "tensor"), "b": (), "c": (("data", "fsdp"), None)}
    places = {name: NamedSharding(mesh, PartitionSpec(*spec)) for name, spec in specs.items()}
    shapes = {name: jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=place) for name, place in places.items()}
    return sizes.parameter_line(shapes)


def test_tables(snapshot):
    widths = {"round_widths": {"domino": 2, "tree": 3}, "verify_width": 3, "drafter": {"block_size": 2}}
    parts = [
        on_console(whole_report()),
        *(rows_as_text(rows) for _, _, rows in tables.sections(whole_report())),
        rows_as_text(tables.position_rows(deeper_tree(), 3)),
        tables.width_note(widths) + "\n",
        parameter_line() + "\n",
    ]
    snapshot("tables.txt", "\n".join(parts))


def cards():
    """A Domino drafter without and with figures, a plain one, and one that no server drafts with."""
    domino, _ = load_drafter(GOLDEN / "tied_shift" / "drafter", target_config("tied_shift"), np.dtype("float32"))
    plain = DrafterConfig(**{field.name: getattr(domino, field.name) for field in dataclasses.fields(DrafterConfig)})
    data = {"rows": 12_345, "tokens": 678_901, "fingerprint": "0123456789abcdef0123"}
    local = {
        **RECIPE,
        "target": {"path": "/data/models/qwen", "dtype": "float32", "quantize": "int8"},
        "data": {**RECIPE["data"], "train": "gs://bucket/rows/*.jsonl.gz", "layout": "pack"},
        "train": {**RECIPE["train"], "start_from": "/data/runs/first"},
    }
    yield model_card.model_card(domino, 1_234, "bfloat16", RECIPE, 9, data=data)
    yield model_card.model_card(domino, 1_234, "bfloat16", local, 9, report=whole_report(), tau=3.25)
    yield model_card.model_card(dataclasses.replace(plain, shift_label=False), 1_234, "bfloat16", RECIPE, 9)
    yield model_card.model_card(dataclasses.replace(domino, pure_draft_prefix_len=0), 1_234, "float32", RECIPE, 600)


def test_cards(snapshot, monkeypatch):
    monkeypatch.setattr(model_card, "versions", lambda: ELSEWHERE["versions"])
    monkeypatch.setattr(model_card, "TRAINING_PACKAGES", ())
    snapshot("cards.md", "\n".join(cards()))


def test_page(snapshot):
    """Its body."""
    text = page_of(**tables.page_parts(whole_report()), versions=ELSEWHERE["versions"], pictures={})
    snapshot("page.html", text.partition("<body>")[2])
