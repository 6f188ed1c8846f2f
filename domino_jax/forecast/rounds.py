"""The bytes that a plain step and a round must read, from shapes alone: whether drafting pays, before a download.

    python -m domino_jax.decode --config=configs/qwen3_30b_a3b.py --dry_run --topology=h200

It needs no weights, no accelerator and no compiler. A matrix that a pass multiplies with counts once for the pass, and
so do the caches; of the experts of a layer those count that the rows of the pass use, expected under uniform routing
(ExpertConfig.active). So the bytes are a lower bound. Compiled steps of dense targets move 1.0 to 1.1 times as much,
rounds 1.0 to 1.3, and 1.55 at 0.6B on an H200 (docs/compilers.md). τ is at most the drafts of a round plus one.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from domino_jax.forecast import dry_run, topologies
from domino_jax.method.drafter import init_drafter_params
from domino_jax.method.drafters import AnyConfig, new_drafter
from domino_jax.method.settings import DraftSettings
from domino_jax.models import sharding
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.recipe import builders, cli
from domino_jax.recipe.models import refuse_other_head
from domino_jax.recipe.open_keys import decode_settings
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.sizes import device_bytes
from domino_jax.weights.draft_vocab import with_draft_vocab
from domino_jax.weights.drafter import read_drafter_config
from domino_jax.weights.loading import in_draft_type, with_window
from domino_jax.weights.target import target_shapes

WIDTHS = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True)
class Reads:
    """Bytes that passes read on one chip.

    target: its matrices but the experts and the embedding (a tied one is the lm_head).  experts: all of them.
    cache: keys and values of all requests.  draft: what a draft reads: the drafter, its cache, its columns of the
    lm_head.  resident: all that is in memory.
    """

    config: Qwen3Config
    target: int
    experts: int
    cache: int
    draft: int
    resident: int

    def step(self, rows: int) -> float:
        """A pass of the target over this many rows of all requests together."""
        experts = self.config.experts
        share = experts.active(rows) / experts.num_experts if experts else 0.0
        return self.target + self.cache + share * self.experts

    def round(self, requests: int, drafts: int) -> float:
        return self.step(requests * (drafts + 1)) + self.draft


def main(flags: cli.Flags) -> None:
    config = flags.config
    chip = topologies.CHIPS.get((flags.topology or "").lower())
    target = dry_run.shapes_of(config.target.path)
    if config.drafter.path:
        drafter = read_drafter_config(config.drafter.path, target)
    else:
        drafter = builders.drafter_config_of(config, target)
    for problem in _problems(flags, drafter):
        raise DominoError(f"{problem}.")
    refuse_other_head(drafter.head, flags.head, config.drafter.path or "the recipe")
    decode_settings(config.decode, drafter.head).check(target.vocab_size, drafter)
    requests = config.decode.batch_size // config.decode.mesh.data
    reads = reads_of(config, target, drafter, requests)
    kind = config.decode.dtype if config.decode.draft_weights == "dtype" else config.decode.draft_weights
    print(f"{config.target.path}, drafter {drafter.head} of {drafter.num_hidden_layers} layers in {kind}")
    print("\n".join(lines(reads, drafter.most_drafts, requests, chip)), flush=True)


def _problems(flags: cli.Flags, drafter: AnyConfig) -> Iterator[str]:
    """Flags and keys that this dry run ignores, and values that it cannot count with."""
    decode = flags.config.decode
    ignored = {f"--{name}": getattr(flags, name) for name in ("output", "prompt", "prompts", "interactive")}
    for name, value in {**ignored, "config.decode.concurrency": decode.concurrency}.items():
        if value:
            yield f"--dry_run and {name} are both given, but --dry_run ignores {name}; remove one of them"
    if flags.topology and flags.topology.lower() not in topologies.CHIPS:
        yield (
            f"--topology={flags.topology}: no such chip; name one of {', '.join(topologies.CHIPS)}, without a number of"
            " chips, which decode.mesh states"
        )
    if -1 in (decode.mesh.data, decode.mesh.tensor):
        yield "--dry_run needs decode.mesh.data and decode.mesh.tensor as numbers, not as -1, the rest"
    if not drafter.has_backbone:
        yield f"--dry_run computes rounds of drafters of blocks, but the head is {drafter.head!r}: leave --dry_run out"
    if decode.batch_size % decode.mesh.data:
        parts = f"decode.mesh.data = {decode.mesh.data} parts; make it a multiple"
        yield f"decode.batch_size {decode.batch_size} cannot be cut into {parts}"


def reads_of(config, target: Qwen3Config, drafter: AnyConfig, requests: int) -> Reads:
    """For `requests` requests on a chip, with decode.mesh.tensor chips that share the target."""
    settings, dtype = decode_settings(config.decode, drafter.head), np.dtype(config.decode.dtype)
    mesh = AbstractMesh((1, 1, config.decode.mesh.tensor), sharding.MESH_AXES)
    place = sharding.decode_placement(mesh, target.num_key_value_heads, target.tie_word_embeddings)

    def on_chip(tree: Any, *parts: str) -> int:
        """Bytes of the leaves whose path has all of these names."""
        total = 0
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            names = [part.key for part in path]
            if set(parts) <= set(names):
                total += device_bytes(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place(names, leaf.shape)))
        return total

    scheme = dry_run.scheme_of(config.target.path, config.target.quantize)
    params = target_shapes(target, dtype, scheme)
    whole, experts, embedding = on_chip(params), on_chip(params, sharding.EXPERTS), on_chip(params, "embed_tokens")
    vocabulary = embedding if target.tie_word_embeddings else on_chip(params, "lm_head")
    draft = drafter_shapes(drafter, target, params, settings.drafting, dtype)
    weights, copies = on_chip(draft), on_chip(draft, "lm_head")
    drafter = with_window(drafter, settings.drafting)
    slots = settings.cache_length
    heads = [model.num_key_value_heads * model.head_dim * 2 * dtype.itemsize * requests for model in (target, drafter)]
    split = mesh.shape["tensor"] if target.num_key_value_heads % mesh.shape["tensor"] == 0 else 1
    cache = heads[0] * slots * target.num_hidden_layers // split
    context = heads[1] * slots * drafter.num_hidden_layers // split
    return Reads(
        target,
        whole - experts - (0 if target.tie_word_embeddings else embedding),
        experts,
        cache,
        weights + context + (0 if copies else vocabulary),
        whole + weights + cache + context,
    )


def drafter_shapes(
    drafter: AnyConfig, target: Qwen3Config, target_params: dict, drafting: DraftSettings, dtype: np.dtype
) -> dict:
    """A drafter's parameters as shapes, with the columns of the lm_head that draft_vocab and draft_weights copy."""

    def loaded(params, target_params):
        config = drafter
        if drafting.draft_vocab:
            tokens = np.arange(drafting.draft_vocab)
            config, params = with_draft_vocab(drafter, params, target, target_params, tokens, None)
        return in_draft_type(config, params, target, target_params, drafting)

    shapes = jax.eval_shape(lambda: init_drafter_params(new_drafter(drafter, dtype), jax.random.key(0)))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)
    return jax.eval_shape(loaded, shapes, target_params)


def lines(reads: Reads, most: int, requests: int, chip: topologies.Chip | None) -> list[str]:
    """The printed lines: a row for the step and for each width. most: drafts of a round."""
    memory = f"{reads.resident / 1e9:.1f} GB"
    if chip:
        fits = "fit" if reads.resident < chip.memory else "DO NOT FIT"
        memory += f" of {chip.memory / 1e9:.0f} GB: they {fits}"
    experts = reads.config.experts
    head = ("drafts", "rows", *(("experts",) if experts else ()), "GB", *(("ms",) if chip else ()), "÷ step")
    table, step = [head], reads.step(requests)
    for drafts in (0, *sorted({min(width, most) for width in WIDTHS})):
        rows = requests * (drafts + 1)
        moved = reads.round(requests, drafts) if drafts else step
        row = [f"{drafts}" if drafts else "step", f"{rows}"]
        row += [f"{experts.active(rows):.0f} of {experts.num_experts}"] if experts else []
        row += [f"{moved / 1e9:.2f}"]
        row += [f"{1e3 * moved / chip.bandwidth:.2f}"] if chip else []
        table.append((*row, f"{moved / step:.2f}{' never pays' if moved > step * (drafts + 1) else ''}"))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        f"weights and caches of {requests} request(s), {memory}",
        f"bytes that a {chip.noun if chip else 'chip'} must read, at least"
        + (", and their time by its data sheet" if chip else ""),
        *("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in table),
        "A round pays where τ at its width is above the last column.",
    ]
