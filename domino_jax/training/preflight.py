"""Checks of model, data and plan before the first step: what would waste a run is reported, or stops it.

Errors: a mask token outside the embedding or inside the text of rows, layer ids that the target does not have, a target
whose logits are not finite. Warnings, each with a remedy: rows without an anchor, answers that the target would hardly
give (the main cause of low acceptance). <workdir>/preflight.json and preflight.md hold the findings.
"""

import functools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.text
from etils import epath
from jax.sharding import Mesh

from domino_jax.data.chat import Row
from domino_jax.data.rows import TrainingRows
from domino_jax.method.kinds import AnyConfig
from domino_jax.method.losses import cross_entropy, scan_sum
from domino_jax.models.qwen3 import Qwen3
from domino_jax.models.sharding import batch_sharding, replicated, row_shards
from domino_jax.models.slices import cut
from domino_jax.runtime.distributed import is_primary
from domino_jax.runtime.errors import DataError
from domino_jax.runtime.files import write_whole
from domino_jax.runtime.progress import Progress
from domino_jax.training.estimates import Plan, run_length
from domino_jax.weights.fit import check_fits
from domino_jax.weights.loading import LoadedTarget

READ_ROWS = 256  # rows searched for the mask token, drawn evenly from all
NAMED_ROWS = 5
SHOWN_CHARACTERS = 600  # of one piece of the example row
MANY_WITHOUT_ANCHOR = 0.1
FEW_SUPERVISED = 0.02
LOW_LOGPROB = -2.0  # nats per token in the mean; answers below it are reported, since the target would hardly give them
SCORED_TOKENS = 4_096  # of a device at a time
SLICE_TOKENS = 128  # of a row whose logits are in memory at once


class Sampled(NamedTuple):
    where: str
    row: Row


def run_preflight(
    workdir: str | os.PathLike,
    *,
    rows: TrainingRows,
    fingerprint: str,
    loaded: LoadedTarget,
    drafter: AnyConfig,
    plan: Plan,
    mesh: Mesh,
) -> dict[str, Any]:
    """Checks, measures, prints and saves; every process calls it, process 0 prints and writes.

    Args:
        workdir: local folder or gs:// address.  fingerprint: of the data.
        loaded: the target, its parameters anywhere on the mesh.
    Returns:
        what preflight.json holds.
    Raises:
        DataError: training would be for nothing.
    """
    target = loaded.model
    check_fits(drafter, target.config)
    sample = draw(rows, max(READ_ROWS, plan.scored_rows), plan.seed)
    mask_token_id = drafter.mask_token_id if drafter.has_backbone else None
    if mask_token_id is not None:
        check_mask_token(mask_token_id, sample)
    found = {
        "mask_token_id": mask_token_id,
        "target_layer_ids": list(drafter.target_layer_ids),
        "target_layers": target.config.num_hidden_layers,
        "data": describe_data(rows, fingerprint),
        "example": {"where": sample[0].where, "text": "".join(marked(sample[0].row, loaded.tokenizer))},
        "target_logprob": None,
        "plan": run_length(target.config, drafter, plan, len(rows), rows.num_tokens, mesh.size),
    }
    if plan.scored_rows:
        scored = sample[: plan.scored_rows]
        scores = mean_logprobs(target, loaded.params, [one.row for one in scored], plan.max_length, mesh)
        found["target_logprob"] = describe_scores(scored, scores)
    found["warnings"] = warnings(found, plan, target.config.max_position_embeddings)
    if is_primary():
        save(epath.Path(workdir), found)
        show(found, marked(sample[0].row, loaded.tokenizer), rich.console.Console())
    return found


# ------------------------------------------------------------------------------------------------------ data


def draw(rows: TrainingRows, count: int, seed: int) -> list[Sampled]:
    """`count` different rows (or all), the same in every process."""
    chosen = np.random.default_rng(seed).choice(len(rows), min(count, len(rows)), replace=False)
    numbered = [rows[int(index)] for index in chosen]
    return [Sampled(rows.where(row_id), row) for row_id, row in numbered]


def check_mask_token(mask_token_id: int, sample: Sequence[Sampled]) -> None:
    """A mask token in the text would be a draft and a label at once."""
    holding = [one.where for one in sample if (one.row.token_ids == mask_token_id).any()]
    if holding:
        raise DataError(
            f"{holding[0]}: the row has the mask token {mask_token_id} in its text, as {len(holding)} of {len(sample)} "
            "rows do; the drafter could not distinguish the two.\n"
            "Set --config.drafter.mask_token_id to a row of the embedding that no text uses."
        )


def describe_data(rows: TrainingRows, fingerprint: str) -> dict[str, Any]:
    return {
        "fingerprint": fingerprint,
        "rows": len(rows),
        "rows_read": rows.num_read,
        "rows_without_anchor": rows.num_skipped,
        "fraction_without_anchor": rows.num_skipped / rows.num_read,
        "tokens": rows.num_tokens,
        "supervised_tokens": rows.num_supervised,
        "supervised_fraction": rows.num_supervised / rows.num_tokens,
    }


def marked(row: Row, tokenizer: Any) -> list[str]:
    """The row's text in pieces, supervised ones as [[…]]; long ones without their middle, ids without a tokenizer."""
    edges = np.flatnonzero(np.diff(row.loss_mask > 0.5)) + 1
    pieces = []
    for ids, mask in zip(np.split(row.token_ids, edges), np.split(row.loss_mask, edges), strict=True):
        if tokenizer is None:
            text = " ".join(map(str, ids.tolist())) + " "
        else:
            text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        if len(text) > SHOWN_CHARACTERS:
            half = SHOWN_CHARACTERS // 2
            text = f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"
        pieces.append(f"[[{text}]]" if mask[0] > 0.5 else text)
    return pieces


def describe_scores(sample: Sequence[Sampled], scores: np.ndarray) -> dict[str, Any]:
    strange = np.flatnonzero(~np.isfinite(scores))
    if strange.size:
        raise DataError(
            f"{sample[strange[0]].where}: the target's log-probability of the answer is {scores[strange[0]]}; its "
            "weights or config.target.dtype are not usable as they are."
        )
    pairs = sorted((float(score), one.where) for score, one in zip(scores, sample, strict=True))
    low = [{"where": where, "logprob": score} for score, where in pairs if score < LOW_LOGPROB]
    return {
        "rows": len(scores),
        "mean": float(scores.mean()),
        "median": float(np.median(scores)),
        "lowest": float(scores.min()),
        "threshold": LOW_LOGPROB,
        "num_low": len(low),
        "low": low[:NAMED_ROWS],
    }


# ------------------------------------------------------------------------------------------------------ scores


def mean_logprobs(target: Qwen3, params: dict, rows: Sequence[Row], length: int, mesh: Mesh) -> np.ndarray:
    """Each row's mean log-probability of its supervised tokens under the target, float64 [rows], nats.

    Rows are padded to `length` and go through in batches spread over the mesh; all processes get all figures.
    """
    shards = row_shards(mesh)
    batch = shards * min(max(1, SCORED_TOKENS // length), -(-len(rows) // shards))
    score = jax.jit(functools.partial(supervised_logprob, target), out_shardings=replicated(mesh))
    means = []
    console = rich.console.Console(quiet=not is_primary())
    with jax.set_mesh(mesh), Progress("target scores answers", len(rows), console=console) as progress:
        for start in range(0, len(rows), batch):
            tokens, mask = np.zeros((batch, length), np.int32), np.zeros((batch, length), np.float32)
            part = rows[start : start + batch]
            for place, row in enumerate(part):
                tokens[place, : len(row.token_ids)] = row.token_ids
                mask[place, : len(row.loss_mask)] = row.loss_mask
            scores = score(params, *(global_rows(mesh, array) for array in (tokens, mask)))
            total, count = (np.asarray(array, np.float64) for array in jax.device_get(scores))
            means.append((total / np.maximum(count, 1))[: len(part)])
            progress.advance(len(part))
    return np.concatenate(means)


def global_rows(mesh: Mesh, rows: np.ndarray) -> jax.Array:
    """The rows, the same in every process, as one array over the mesh."""
    return jax.make_array_from_callback(rows.shape, batch_sharding(mesh), lambda index: rows[index])


def supervised_logprob(
    target: Qwen3, params: dict, tokens: jax.Array, mask: jax.Array, size: int = SLICE_TOKENS
) -> tuple[jax.Array, jax.Array]:
    """Sum of log p(token | those before it) over the supervised tokens of each row, and their number: float32 [B].

    tokens int32, mask float32 [B, S]. The first token of a row has nothing before it and does not count. Logits are
    in memory for `size` positions at a time.
    """
    hidden = target.apply({"params": params}, tokens, with_logits=False)["hidden"][:, :-1]
    labels, weights = tokens[:, 1:], mask[:, 1:]

    def score(hidden, labels, weights):
        logits = target.apply({"params": params}, hidden, method="unembed")
        return -jnp.sum(weights * cross_entropy(logits, labels), axis=1)

    parts = (cut(x, 1, min(size, labels.shape[1])) for x in (hidden, labels, weights))
    return scan_sum(score, tuple(parts)), weights.sum(axis=1)


# ------------------------------------------------------------------------------------------------------ report


def warnings(found: Mapping[str, Any], plan: Plan, positions: int) -> list[str]:
    """What to look at before the run goes on, each with a remedy."""
    lines = []
    data, scores = found["data"], found["target_logprob"]
    if scores and scores["num_low"]:
        named = ", ".join(f"{one['where']} ({one['logprob']:.2f})" for one in scores["low"])
        more = ", …" if scores["num_low"] > len(scores["low"]) else ""
        lines.append(
            f"the target would hardly give {scores['num_low']} of {scores['rows']} sampled answers (mean "
            f"log-probability below {scores['threshold']:g}): {named}{more}. A drafter trained on them is seldom "
            "accepted: let the target answer the prompts, with python -m domino_jax.regenerate or "
            "--config.data.regenerate=True."
        )
    if data["fraction_without_anchor"] > MANY_WITHOUT_ANCHOR:
        lines.append(
            f"{data['rows_without_anchor']:,} of {data['rows_read']:,} rows have no two supervised tokens in a row "
            f"within data.max_length {plan.max_length} and are left out; raise it if their answers come later."
        )
    if data["supervised_fraction"] < FEW_SUPERVISED:
        lines.append(
            f"only {data['supervised_fraction']:.1%} of the tokens are supervised; look at the row shown, whose answer "
            "should be in [[ ]]."
        )
    if plan.max_length > positions:
        lines.append(
            f"data.max_length {plan.max_length} is beyond the target's max_position_embeddings {positions}; its "
            "predictions there are not reliable."
        )
    return lines


def facts(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what, how much) of every finding, for console and file alike."""
    data, plan, scores = (found[name] for name in ("data", "plan", "target_logprob"))
    lines = []
    if found["mask_token_id"] is not None:
        lines.append(("mask token", f"{found['mask_token_id']}, in the embedding, in none of the rows searched"))
    lines += [
        ("target layers", f"{found['target_layer_ids']} of {found['target_layers']}"),
        ("rows", f"{data['rows']:,} of {data['rows_read']:,}; {data['fraction_without_anchor']:.1%} have no anchor"),
        ("tokens", f"{data['tokens']:,}, {data['supervised_fraction']:.1%} supervised"),
    ]
    if scores:
        text = f"{scores['mean']:.2f} a token in the mean of {scores['rows']} answers, lowest {scores['lowest']:.2f}"
        lines.append(("target log-probability", text))
    counts = f"{plan['steps']:,} steps, {plan['rows']:,} rows, {plan['tokens']:,} tokens, {plan['epochs']:.2f} epochs"
    lines.append(("the run", counts))
    if plan["hours"] is None:
        hours = f"known after the first steps: no peak is listed for {plan['device']!r}"
    else:
        hours = f"{plan['hours']:.1f} at {plan['utilisation']:.0%} of the peak of {plan['devices']} × {plan['device']}"
    lines.append(("hours (estimate)", f"{hours}; {plan['flops_per_step']:.3g} FLOPs a step"))
    return lines


def show(found: Mapping[str, Any], pieces: Sequence[str], console: rich.console.Console) -> None:
    """The findings on the console; the supervised part of the example in colour where there is colour."""
    say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say("pre-flight", style="bold")
    for name, value in facts(found):
        say(f"  {name}: {value}")
    say(f"  a row ({found['example']['where']}), its supervised part in [[ ]]:")
    say(rich.text.Text.assemble(*[(piece, "green" if piece.startswith("[[") else "dim") for piece in pieces]))
    for warning in found["warnings"]:
        say(f"warning: {warning}", style="yellow")


def save(workdir: epath.Path, found: Mapping[str, Any]) -> None:
    """preflight.json for programs, preflight.md for people."""
    workdir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(workdir / "preflight.json", text + "\n")
    lines = ["# Pre-flight", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in facts(found)]
    lines += ["", *[f"**Warning:** {warning}\n" for warning in found["warnings"]]]
    lines += [f"A row ({found['example']['where']}), its supervised part in [[ ]]:", ""]
    lines += [f"    {line}" for line in found["example"]["text"].splitlines()]
    write_whole(workdir / "preflight.md", "\n".join(lines) + "\n")
