"""Checks of model and data before the first step, printed and stored in <workdir>/preflight.json.

The most expensive mistake is to train on answers that are not the target's. They show in the share of supervised tokens
that the target itself would choose: nearly all of its own greedy answers, fewer of any other text.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh

from domino_jax.data.chat import TrainingRow
from domino_jax.data.rows import TrainingRows, mark_answers
from domino_jax.method.kinds import AnyConfig
from domino_jax.models.qwen3 import Qwen3
from domino_jax.models.sharding import batch_sharding, replicated, row_shards
from domino_jax.runtime.distributed import is_primary
from domino_jax.runtime.errors import DataError
from domino_jax.runtime.json_files import write_json
from domino_jax.weights.loading import LoadedTarget

READ_ROWS = 256  # rows that are searched, drawn evenly from all
SCORED_ROWS = 64  # of them, those that the target reads


def run_preflight(
    workdir: epath.Path,
    rows: TrainingRows,
    loaded: LoadedTarget,
    drafter: AnyConfig,
    mesh: Mesh,
    fingerprint: str,
    seed: int,
) -> dict[str, Any]:
    """Checks, prints and stores; every process calls it, process 0 prints and writes. Returns the stored facts.

    Args:
        fingerprint: of the data.  seed: of the sample.
    Raises DataError for a mask token in the text of the rows.
    """
    numbers = np.random.default_rng(seed).permutation(len(rows))[:READ_ROWS]
    sample = [rows[int(number)] for number in numbers]
    mask_token_id = drafter.mask_token_id if drafter.has_backbone else None
    for row_id, row in sample if mask_token_id is not None else ():
        if (row.token_ids == mask_token_id).any():  # it would be a draft and a label at once
            raise DataError(
                f"{rows.where(row_id)}: the row has the mask token {mask_token_id} in its text.\n"
                "Set --config.drafter.mask_token_id to a row of the embedding that no text uses."
            )
    drawn = [row for _, row in sample]
    facts = {
        "mask_token_id": mask_token_id,
        "stop_ids": list(loaded.stop_ids),
        "data": {"fingerprint": fingerprint, **rows.counts()},
        "rows_searched": len(drawn),
        "chosen_share": chosen_share(loaded, drawn[:SCORED_ROWS], mesh),
    }
    if is_primary():
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(workdir / "preflight.json", facts)
        print("pre-flight", *describe(facts, loaded.stop_tokens()), sep="\n")
        print(f"a row ({rows.where(sample[0][0])}):", mark_answers(drawn[0], loaded.tokenizer), sep="\n", flush=True)
    return facts


def describe(facts: dict[str, Any], stop_tokens: Sequence[str]) -> list[str]:
    """Lines for the console; a warning comes with its remedy."""
    data, share = facts["data"], facts["chosen_share"]
    lines = [
        f"mask token {facts['mask_token_id']}, stop ids {', '.join(stop_tokens) or 'none'}",
        f"{data['rows']:,} of {data['rows_read']:,} rows are used, {data['rows_without_anchor']:,} have no anchor",
        f"{data['supervised_tokens'] / data['tokens']:.1%} of {data['tokens']:,} tokens are supervised",
        f"the target itself would choose {share:.1%} of the supervised tokens",
    ]
    if share < 0.7:  # sampling with the usual settings gives more
        lines.append("warning: these answers are not its own, and a drafter trained on them is seldom accepted.")
        lines.append("Let it answer the prompts: domino_jax.regenerate or --config.data.regenerate=True.")
    return lines


def chosen_share(loaded: LoadedTarget, rows: Sequence[TrainingRow], mesh: Mesh) -> float:
    """The share of the supervised tokens in `rows` to which the target gives the largest logit, in every process."""
    choose = jax.jit(functools.partial(choices, loaded.model), out_shardings=replicated(mesh))
    chosen, length, batch = [], max(len(row.token_ids) for row in rows), row_shards(mesh)
    for start in range(0, len(rows), batch):  # a row on each device, so that its states fit beside the model
        tokens = np.zeros((batch, length), np.int32)
        for place, row in enumerate(rows[start : start + batch]):
            tokens[place, : len(row.token_ids)] = row.token_ids
        with jax.set_mesh(mesh):
            placed = jax.make_array_from_callback(tokens.shape, batch_sharding(mesh), tokens.__getitem__)
            best = np.asarray(choose(loaded.params, placed))
        for row, mine in zip(rows[start : start + batch], best, strict=False):
            labels = np.flatnonzero(row.loss_mask[1:] > 0.5) + 1  # the first token has nothing before it
            chosen.append(mine[labels - 1] == row.token_ids[labels])
    return float(np.concatenate(chosen).mean())


def choices(target: Qwen3, params: dict, tokens: jax.Array) -> jax.Array:
    """The token with the largest logit after each prefix, in slices of a row; tokens and result int32 [B, T]."""
    apply = functools.partial(target.apply, {"params": params})
    hidden = apply(tokens, with_logits=False)["hidden"].swapaxes(0, 1)
    return jax.lax.map(lambda row: jnp.argmax(apply(row, method="unembed"), -1), hidden, batch_size=128).T
