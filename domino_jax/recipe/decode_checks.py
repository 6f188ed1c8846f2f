"""Checks of a recipe's decode section, alone and against the drafter that a training decodes with at its end."""

import math
from collections.abc import Collection

from domino_jax.decoding.decode_settings import modes_of, tree_settings
from domino_jax.method.names import CHAIN, EAGLE3, LONGEST_CHAIN, MARKOV, ROW_DRAFTERS
from domino_jax.method.settings import (
    BASELINE,
    DRAFT,
    MODES,
    TREE,
    DraftSettings,
    SamplingParams,
    cache_problem,
    canonical_mode,
    parity_problem,
    refused_mode,
)
from domino_jax.recipe.head_rules import decoded_rank_rule
from domino_jax.recipe.values import confidence_head, refuse, require, shifts_labels, whole_numbers


def check_sampling(section: str, values, min_p: float = 0.0) -> None:
    """The sampling values of a section."""
    refuse(section, SamplingParams(values.temperature, values.top_k, values.top_p, min_p).problem())


def check_decode(config) -> None:
    """The decode section."""
    decode, modes = config.decode, modes_of(config.decode, config.drafter.head)
    known = all(mode in MODES for mode in modes)
    require(
        bool(modes) and known and len(set(modes)) == len(modes),
        "decode.modes",
        modes,
        f"list some of {', '.join(MODES)}, each once, as --config.decode.modes=\"('autoregressive','domino')\"",
    )
    check_sampling("decode", decode, decode.min_p)
    require(
        decode.cache_length > decode.max_new_tokens,
        "decode.cache_length",
        decode.cache_length,
        f"it holds the prompt and decode.max_new_tokens {decode.max_new_tokens}; make it larger or generate "
        "fewer tokens",
    )
    _check_drafting(decode, modes)


def _check_drafting(decode, modes: Collection[str]) -> None:
    require(
        decode.parity == "near_tie" or bool(set(modes) - {BASELINE}),
        "decode.parity",
        decode.parity,
        "it gives plain decoding the width of a draft block, and decode.modes drafts nothing; add a mode that does",
    )
    tau = decode.simulate_tau
    require(tau == 0 or 1 <= tau < math.inf, "decode.simulate_tau", tau, "0 is off; a round emits 1 token or more")
    change = f"none of decode.modes {', '.join(modes)} reads it; add {DRAFT}, or set it to 0"
    fine = not decode.confidence or DRAFT in map(canonical_mode, modes)
    require(fine, "decode.confidence", decode.confidence, change)
    sizes = decode.concurrency
    require(
        whole_numbers(sizes, 1),
        "decode.concurrency",
        sizes,
        'list batch sizes, as --config.decode.concurrency="(1,8,32)"',
    )
    for key in ("tasks", "compare"):
        fine = all(isinstance(entry, str) and entry for entry in decode[key])
        require(fine, f"decode.{key}", decode[key], f"list texts, as --config.decode.{key}=\"('NAME',)\"")
    check_mesh("decode.mesh", decode.mesh, ("data", "tensor"))
    _check_tree(decode, modes)


def _check_tree(decode, modes: Collection[str]) -> None:
    tree = tree_settings(decode.tree)
    refuse("decode", tree.problem())
    if TREE in modes:
        refuse("decode", parity_problem(decode.parity, tree))
        refuse("decode", cache_problem(tree, decode.cache_length, decode.max_new_tokens))


def check_mesh(section: str, mesh, axes: Collection[str]) -> None:
    """The sizes of a mesh."""
    for axis in axes:
        size = mesh[axis]
        require(size >= 1 or size == -1, f"{section}.{axis}", size, "give a number of devices, or -1 for the rest")
    rest = [axis for axis in axes if mesh[axis] == -1]
    require(len(rest) <= 1, section, rest, "only one axis can be -1 (the rest of the devices)")


def check_final_decoding(config) -> None:
    """Refuses before the training what the final decoding would refuse after it."""
    drafter, decode, modes = config.drafter, config.decode, modes_of(config.decode, config.drafter.head)
    for mode in modes:
        refused = refused_mode(mode, drafter.head)
        change = f"of decode.modes, which eval.final decodes in, {refused}"
        require(refused is None, "drafter.head", drafter.head, change)
    if not set(modes) - {BASELINE}:
        return
    sure = drafter.head == MARKOV and confidence_head(config)
    change = f"a drafter of drafter.head {drafter.head} has no confidence head; set it to 0"
    if drafter.head == MARKOV:
        change = "this drafter gets no confidence head (drafter.enable_confidence_head, train.loss); set it to 0"
    require(sure or decode.confidence == 0, "decode.confidence", decode.confidence, change)
    require(*decoded_rank_rule(drafter, decode))
    tree = tree_settings(decode.tree) if TREE in modes else None
    drafting = DraftSettings(num_drafts=decode.num_drafts or None, tree=tree)
    drafts, most = drafter.block_size - (0 if shifts_labels(drafter) else 1), None
    if drafter.head in ROW_DRAFTERS:
        drafts, most = (CHAIN, LONGEST_CHAIN) if drafter.head == EAGLE3 else (drafter.medusa.num_heads, None)
    size = drafts + 1 if drafter.head in ROW_DRAFTERS else drafter.block_size
    refuse("decode", drafting.problem(size, drafts, most))
