"""Measurements of one trained drafter: the recall of its base logits, its decodings and its sizes.

    python -m benchmarks.studies.drafter_probe --run=WORKDIR --answers=ROWS.jsonl --prompts=FILE.jsonl --output=FOLDER

--run is a finished workdir of domino_jax.train, --answers are rows of domino_jax.regenerate for held-out prompts. Block
drafters predict the target's own answers after anchors that depend on the rows alone, so all drafters of one layout
see the same blocks. Recall at K of a slot is the share of its labels among the K likeliest tokens of the base logits:
the most that a head which reorders K candidates can get right. Drafters of another structure have no blocks. All are
decoded (drafter_decoding.py), and so are the checkpoints of the run. Writes FOLDER/figures.json, last; a command that
was interrupted continues in its folder.
"""

import argparse
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device.random_models import state_of
from benchmarks.studies.drafter_decoding import CURVE_PROMPTS, Plan, curve, decoded, read_lines
from domino_jax.decoding.generate import new_generator
from domino_jax.method import blocks
from domino_jax.method.heads.eagle3_config import Eagle3Config
from domino_jax.method.heads.medusa import MedusaConfig
from domino_jax.method.loop import DecodeState
from domino_jax.method.losses import LossSettings, accepted_lengths
from domino_jax.method.pair import Models
from domino_jax.method.settings import BACKBONE, BASELINE, DOMINO, DRAFT, GeneratorSettings
from domino_jax.method.step import corrected, label_blocks, target_pass
from domino_jax.runtime.files import write_whole
from domino_jax.training.estimates import device_bytes
from domino_jax.weights import loading

FIGURES = "figures.json"
KS = (1, 16)
ANCHORS = 32  # of a row
ROWS = 4  # together
SLOTS = 256  # of the caches whose bytes count


def digest(rows: Sequence[dict[str, Any]]) -> str:
    """SHA-256 of the token ids of all rows in order."""
    joined = hashlib.sha256()
    for row in rows:
        joined.update(np.asarray([len(row["token_ids"]), *row["token_ids"]], np.int32).tobytes())
    return joined.hexdigest()


def batches(rows: Sequence[dict[str, Any]]) -> list[dict[str, jax.Array]]:
    """All rows padded to the longest, ROWS at a time; the last batch is filled up with rows that count nowhere."""
    longest = max(len(row["token_ids"]) for row in rows)
    count = -(-len(rows) // ROWS) * ROWS
    tokens, masks = np.zeros((count, longest), np.int32), np.zeros((count, longest), np.float32)
    for place, row in enumerate(rows):
        tokens[place, : len(row["token_ids"])] = row["token_ids"]
        masks[place, : len(row["loss_mask"])] = row["loss_mask"]
    arrays = {"tokens": tokens, "loss_mask": masks, "row_ids": np.arange(count, dtype=np.int32)}
    return [
        {name: jnp.asarray(array[start : start + ROWS]) for name, array in arrays.items()}
        for start in range(0, count, ROWS)
    ]


def block_figures(models: Models, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """{"recall": {K: by slot}, "accuracy": by slot of the final logits, "accept_len": mean, "labels": by slot}.

    Slots are those that predict. accept_len is teacher-forced: the head reads the true tokens.
    """
    config = models.drafter.config

    @jax.jit
    def measure(models: Models, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        anchors, keep = blocks.sample_anchors(jax.random.key(0), batch["loss_mask"], batch["row_ids"], ANCHORS)
        drawn = label_blocks(batch, anchors, keep, config, LossSettings())
        features, _ = target_pass(models.target, models.target_params, batch, config.target_layer_ids)
        x = models.embed(blocks.block_tokens(batch["tokens"], anchors, keep, config.block_size, config.mask_token_id))
        inputs = models.head_inputs(blocks.head_tokens(batch["tokens"], anchors, config.num_drafts))
        z, codes = models.drafter.apply({"params": models.drafter_params}, features, x, anchors, keep, inputs)

        def of_block(part):
            z, codes, labels, weights = part
            base = models.draft_logits(z)
            final = corrected(models.drafter, models.drafter_params, base, codes)
            count = config.candidates(0)
            if count:  # a selector chooses among these alone
                final = jnp.where(base >= jax.lax.top_k(base, count)[0][..., -1:], final, -jnp.inf)
            return slot_sums(base, final, labels, weights)

        parts = (z, codes, drawn.labels.ids, drawn.labels.label_weights)
        sums = jax.lax.map(of_block, jax.tree.map(lambda array: jnp.moveaxis(array, 1, 0), parts))
        return jax.tree.map(lambda array: array.sum(0), sums)

    total = None
    for batch in batches(rows):
        sums = jax.device_get(measure(models, batch))
        total = sums if total is None else jax.tree.map(np.add, total, sums)
    first, labels = config.first_slot, np.maximum(total["labels"], 1.0)
    return {
        "recall": {str(k): (total[f"recall{k}"] / labels)[first:].tolist() for k in KS},
        "accuracy": (total["correct"] / labels)[first:].tolist(),
        "accept_len": float(total["accepted"] / max(total["blocks"], 1.0)),
        "labels": total["labels"][first:].tolist(),
    }


def slot_sums(base: jax.Array, final: jax.Array, labels: jax.Array, weights: jax.Array) -> dict[str, jax.Array]:
    """Sums over blocks, logits [..., G, V], labels and weights [..., G] → by slot [G], and scalars over blocks."""
    picked = jnp.take_along_axis(base, labels[..., None], axis=-1)
    rank = (base > picked).sum(-1)
    correct = jnp.argmax(final, -1) == labels
    has_label = weights.max(-1) > 0

    def by_slot(values: jax.Array) -> jax.Array:
        return (values * weights).sum(tuple(range(weights.ndim - 1)))

    return {
        **{f"recall{k}": by_slot(rank < k) for k in KS},
        "correct": by_slot(correct),
        "labels": by_slot(jnp.ones_like(weights)),
        "accepted": (accepted_lengths(correct, weights) * has_label).sum(),
        "blocks": has_label.sum(),
    }


def round_bytes(models: Models, state: DecodeState, head_candidates: int = 0) -> dict[str, int]:
    """mode → bytes of weights and of full caches that a device reads in a round.

    A drafted round reads the lm_head twice, for the base logits and to verify. The head is read once for each draft
    that it corrects, of its vocabulary matrix the rows of the candidates (0: all of them; a selector has its own
    number), of a token table one row.
    """
    target, drafter = models.target_params, models.drafter_params
    tied = models.target.config.tie_word_embeddings
    read = {name: part for name, part in target.items() if tied or name != "embed_tokens"}
    plain = device_bytes((read, state.target_cache))
    lm_head = read["embed_tokens" if tied else "lm_head"]
    config = models.drafter.config
    if isinstance(config, MedusaConfig):
        return {BASELINE: plain, DRAFT: plain + device_bytes((lm_head, drafter))}
    if isinstance(config, Eagle3Config):  # its layer and its lm_head are read for every draft
        each = device_bytes(({name: part for name, part in drafter.items() if name != "fc"}, state.draft_cache))
        return {BASELINE: plain, DRAFT: plain + device_bytes(drafter["fc"]) + config.num_drafts * each}
    backbone = plain + device_bytes((lm_head, drafter["backbone"], state.draft_cache))
    head = 0
    if config.has_head:
        matrices = {name: part for name, part in drafter["head"].items() if name != "predecessor"}
        vocabulary = device_bytes(matrices["up"])
        count = config.candidates(head_candidates)
        part = min(state.done.shape[0] * count / config.vocab_size, 1) if count else 1
        each = device_bytes(matrices) - round((1 - part) * vocabulary)
        head = (config.block_size - config.suffix_start) * each
    return {BASELINE: plain, BACKBONE: backbone, DOMINO: backbone + head}


def sizes(models: Models) -> dict[str, int]:
    """{"stored": parameters, "head": those of the head, "draft_bytes": weights and caches that a draft reads}."""
    generator = new_generator(models, GeneratorSettings(cache_slots=SLOTS, smallest_cache=SLOTS, max_new_tokens=64))
    state = state_of(models, generator, 1, SLOTS, SLOTS // 2)
    read = round_bytes(models, state)
    counts = {name: sum(leaf.size for leaf in jax.tree.leaves(part)) for name, part in models.drafter_params.items()}
    whole = [amount for mode, amount in read.items() if mode != BASELINE][-1]
    return {
        "stored": sum(counts.values()),
        "head": counts["head"] if "head" in counts else 0,
        "draft_bytes": whole - read[BASELINE],
    }


def probe(run: pathlib.Path, answers: pathlib.Path, plan: Plan, output: pathlib.Path) -> dict[str, Any]:
    recipe = json.loads((run / "config.json").read_text())
    loaded = loading.load_target(recipe["target"]["path"], recipe["decode"]["dtype"])
    models = loading.load_models(loaded, str(run))
    rows = read_lines(answers)
    return {
        **sizes(models),
        "rows": digest(rows),
        "blocks": block_figures(models, rows) if models.drafter.config.has_backbone else None,
        "decoded": decoded(models, loaded, recipe, plan, output / "decoded"),
        "curve": curve(models, loaded, recipe, plan, run, output / "checkpoints"),
        "curve_prompts": min(plan.count, CURVE_PROMPTS),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("run", "answers", "output"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--count", type=int, default=32, help="prompts to decode")
    parser.add_argument("--modes", default=f"{BASELINE},{DRAFT}", help="joined by commas")
    parser.add_argument("--drafts", type=int, default=15, help="of a chain")
    parser.add_argument("--published", type=int, default=0, help="also decode chains of as many drafts; 0: do not")
    parser.add_argument("--nodes", type=int, default=16, help="of a tree, the root included")
    parser.add_argument("--seed", type=int, default=0, help="of the noise at temperature 1")
    choices = parser.parse_args(arguments)
    modes = tuple(choices.modes.split(","))
    plan = Plan(choices.prompts, choices.count, modes, choices.drafts, choices.published, choices.nodes, choices.seed)
    choices.output.mkdir(parents=True, exist_ok=True)
    found = probe(choices.run, choices.answers, plan, choices.output)
    write_whole(choices.output / FIGURES, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
