"""Checks of model and data before the first step; the results are printed and stored in <workdir>/preflight.json.

The most expensive mistake is to train on answers that are not the target's. It shows in the share of supervised tokens
that the target itself would choose: nearly all tokens of its own greedy answers, about four in five of answers that it
sampled at temperature 1, and fewer of any other text.
"""

import functools
import json
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh

from domino_jax.data.chat import Row
from domino_jax.data.rows import TrainingRows, mark_answers
from domino_jax.method.kinds import AnyConfig
from domino_jax.models.qwen3 import Qwen3
from domino_jax.models.sharding import batch_sharding, replicated, row_shards
from domino_jax.runtime.distributed import is_primary
from domino_jax.runtime.errors import DataError
from domino_jax.runtime.files import write_whole
from domino_jax.weights.fit import check_fits
from domino_jax.weights.loading import LoadedTarget

READ_ROWS = 256  # rows that are searched, drawn evenly from all
LOW_SHARE = 0.7  # of the target's choices; sampling with the usual settings gives more
SLICE_TOKENS = 128  # of a row whose logits are in memory at once


def run_preflight(
    workdir: str | os.PathLike,
    rows: TrainingRows,
    loaded: LoadedTarget,
    drafter: AnyConfig,
    mesh: Mesh,
    *,
    fingerprint: str,
    scored_rows: int,
    seed: int,
) -> dict[str, Any]:
    """Checks, prints and stores; every process calls it, process 0 prints and writes. Returns the stored facts.

    Args:
        fingerprint: of the data.  scored_rows: rows whose answers the target reads; 0: none.  seed: of the sample.
    Raises:
        DataError: layer ids that the target does not have, or a mask token in the text of the rows.
    """
    check_fits(drafter, loaded.model.config)
    numbers = np.random.default_rng(seed).permutation(len(rows))[: max(READ_ROWS, scored_rows)]
    sample = [rows[int(number)] for number in numbers]
    mask_token_id = drafter.mask_token_id if drafter.has_backbone else None
    for row_id, row in sample if mask_token_id is not None else ():
        if (row.token_ids == mask_token_id).any():  # it would be a draft and a label at once
            raise DataError(
                f"{rows.where(row_id)}: the row has the mask token {mask_token_id} in its text.\n"
                "Set --config.drafter.mask_token_id to a row of the embedding that no text uses."
            )
    data = {"rows": len(rows), "rows_read": rows.num_read, "rows_without_anchor": rows.num_skipped}
    data |= {"tokens": rows.num_tokens, "supervised_tokens": rows.num_supervised, "fingerprint": fingerprint}
    share = chosen_share(loaded, [row for _, row in sample[:scored_rows]], mesh) if scored_rows else None
    facts = {"mask_token_id": mask_token_id, "stop_ids": list(loaded.stop_ids), "data": data, "chosen_share": share}
    lines = [
        f"mask token {mask_token_id}, stop ids {facts['stop_ids']}",
        f"rows: {len(rows):,} of {rows.num_read:,}; {rows.num_skipped / rows.num_read:.1%} have no anchor",
        f"tokens: {rows.num_tokens:,}, {rows.num_supervised / rows.num_tokens:.1%} supervised",
    ]
    if share is not None:
        lines.append(f"supervised tokens that the target itself would choose: {share:.1%}")
    if share is not None and share < LOW_SHARE:
        lines.append(
            f"warning: the target would choose {share:.1%} of the supervised tokens: these answers are not its own, and"
            " a drafter trained on them is seldom accepted.\nLet the target answer the prompts, with "
            "python -m domino_jax.regenerate or --config.data.regenerate=True."
        )
    if is_primary():
        epath.Path(workdir).mkdir(parents=True, exist_ok=True)
        write_whole(epath.Path(workdir) / "preflight.json", json.dumps(facts, indent=2) + "\n")
        lines.append(f"a row ({rows.where(sample[0][0])}), its supervised parts in [[ ]]:")
        print("pre-flight", *lines, mark_answers(sample[0][1], loaded.tokenizer), sep="\n", flush=True)
    return facts


def chosen_share(loaded: LoadedTarget, rows: Sequence[Row], mesh: Mesh) -> float:
    """The share of the supervised tokens in `rows` to which the target gives the largest logit, in every process."""
    choose = jax.jit(functools.partial(choices, loaded.model), out_shardings=replicated(mesh))
    length, chosen, supervised = max(len(row.token_ids) for row in rows), 0, 0
    for start in range(0, len(rows), row_shards(mesh)):  # a row on each device, so that its states fit beside the model
        part = rows[start : start + row_shards(mesh)]
        tokens = np.zeros((row_shards(mesh), length), np.int32)
        for place, row in enumerate(part):
            tokens[place, : len(row.token_ids)] = row.token_ids
        with jax.set_mesh(mesh):
            placed = jax.make_array_from_callback(tokens.shape, batch_sharding(mesh), tokens.__getitem__)
            best = np.asarray(choose(loaded.params, placed))
        for place, row in enumerate(part):
            labels = row.loss_mask[1:] > 0.5  # the first token has nothing before it
            chosen += int((best[place, : len(labels)] == row.token_ids[1:])[labels].sum())
            supervised += int(labels.sum())
    return chosen / max(supervised, 1)


def choices(target: Qwen3, params: dict, tokens: jax.Array) -> jax.Array:
    """The token with the largest logit after each prefix; tokens and result int32 [B, T]."""
    hidden = target.apply({"params": params}, tokens, with_logits=False)["hidden"]

    def choose(hidden: jax.Array) -> jax.Array:
        return jnp.argmax(target.apply({"params": params}, hidden, method="unembed"), -1)

    return jax.lax.map(choose, hidden.swapaxes(0, 1), batch_size=SLICE_TOKENS).T
