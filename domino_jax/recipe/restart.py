"""A run that goes on: the prompts that the steps before held out, and lines about other rows or another schedule."""

from collections.abc import Mapping
from typing import Any

from etils import epath

from domino_jax.data.prompts import read_jsonl
from domino_jax.method.curriculum import lambda_base
from domino_jax.method.optimizer import learning_rate
from domino_jax.recipe.readers import unread

HELD_OUT = "held_out.jsonl"
SCHEDULE = ("steps", "learning_rate", "warmup_ratio", "lambda_start", "lambda_decay_ratio")


def has_checkpoints(workdir: epath.Path) -> bool:
    return any((workdir / "checkpoints").glob("[0-9]*"))


def held_out_before(workdir: epath.Path) -> list[dict[str, Any]] | None:
    """The prompt rows that the steps before held out: what evaluates a run stays out of all of its rows.

    [] where they held none out; None for a run without a checkpoint.
    """
    if not has_checkpoints(workdir):
        return None
    stored = workdir / HELD_OUT
    return [row for _, row in read_jsonl(stored)] if stored.exists() else []


def changes(before: Mapping[str, Any], now: Mapping[str, Any], done: int) -> list[str]:
    """Lines about what goes on otherwise after `done` steps.

    before, now: "config", "data" and "target" of the checkpoint and of this start.
    """
    lines = []
    if before["data"] != now["data"]:
        lines.append(f"the rows are others than those of steps 1 to {done}")
    old, new = before["config"]["train"], now["config"]["train"]
    keys = [name for name in SCHEDULE if old[name] != new[name]]
    if keys:
        pairs = zip(_schedules(before["config"]), _schedules(now["config"]), strict=True)
        values = [
            f"{name} at {form.format(to(done))} after {form.format(of(done - 1))}"
            for (name, form, of), (_, _, to) in pairs
        ]
        named = ", ".join(f"train.{name} was {old[name]} and is {new[name]}" for name in keys)
        lines.append(f"{named}: {', '.join(values)}")
    return lines


def _schedules(recipe: Mapping[str, Any]) -> list[tuple]:
    """(name, form, step → value) of what changes over the steps of a resolved recipe."""
    train, steps = recipe["train"], recipe["train"]["steps"]
    rate = learning_rate(train["learning_rate"], steps, train["warmup_ratio"])
    start, ratio = train["lambda_start"], float(train["lambda_decay_ratio"])  # of "inf" too
    schedules = [("the learning rate goes on", "{:.1e}", lambda step: float(rate(step)))]
    if not unread("train.lambda_start", recipe["drafter"]["head"], train["loss"]):
        schedules.append(("λ", "{:.2f}", lambda step: float(lambda_base(step, steps, start, ratio))))
    return schedules
