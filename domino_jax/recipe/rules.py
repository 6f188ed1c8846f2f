"""The checks of a recipe before anything is loaded: the range of each key, and what keys ask of each other.

A range is declared with its key (runtime/keys.py). What a head asks of the recipe is in the head's file, what decode
settings ask of each other in method/settings.py and decoding/settings.py, and what a drafter's shape asks of its target
in method/config.py.
"""

import functools
import operator
from collections.abc import Collection, Iterator

from ml_collections import config_dict

from domino_jax.decoding.settings import BASELINE, MODES, refused_mode
from domino_jax.method.drafters import CONFIGS
from domino_jax.method.settings import Problem, TreeSettings
from domino_jax.recipe.open_keys import decode_settings, modes_of
from domino_jax.recipe.readers import unread, unread_keys
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.keys import walk

# (the recipe's key, whether its value is fine, what to change)
Rule = tuple[str, bool, str]


def check(
    config: config_dict.ConfigDict, command: str, set_keys: Collection[str] = (), given: Collection[str] = ()
) -> None:
    """Refuse a recipe whose values are out of range, do not fit together or are not read.

    Args:
      config: the recipe with the command line's values in it.
      command: a key of readers.READS; what only one command reads is required by that one alone.
      set_keys, given: the recipe's keys and the other flags that the command line sets.
    """
    for key, declared, value in walk(config):
        if change := declared.problem(value):
            refuse(Problem(key, value, change))
    unread_here = list(unread_keys(config, command, set_keys, given))
    rules = [*((entry.key, not entry.refused, entry.why) for entry in unread_here), *_rules(config, command)]
    for key, fine, change in rules:
        if not fine:
            refuse(Problem(key, functools.reduce(operator.getitem, key.split("."), config), change))
    for entry in unread_here:
        print(f"note: config.{entry.key} is not read here: {entry.why}.", flush=True)
    refuse(decode_settings(config.decode, config.drafter.head).problem(), "decode.")
    refuse(TreeSettings(**config.decode.tree).problem(), "decode.")


def refuse(problem: Problem | None, section: str = "") -> None:
    """DominoError for the problem of a key in a section of the recipe, if there is one."""
    if problem:
        raise DominoError(f"config.{section}{problem}")


def _rules(config, command: str) -> Iterator[Rule]:
    """The rules between keys, in the order in which a user would mend them."""
    data, train, decode, evaluation, head = config.data, config.train, config.decode, config.eval, config.drafter.head
    kind, modes, window = CONFIGS[head], modes_of(decode, head), config.drafter.sliding_window
    yield from _mesh_rules("mesh", config.mesh)
    listed = f"list some of {', '.join(MODES)}, as --config.decode.modes=\"('autoregressive','domino')\""
    yield "decode.modes", bool(modes), listed
    yield from _mesh_rules("decode.mesh", decode.mesh)
    if command not in ("train", "dry_run"):  # the others take a drafter as it is
        return
    block = config.drafter.block_size
    wider = f"give drafter.block_size {block} or more, or 0 for no window"
    yield "drafter.sliding_window", not 0 < window < block, wider
    fewer = f"a row of data.max_length {data.max_length} has one anchor less than tokens; change one of the two"
    yield "train.num_anchors", train.num_anchors < data.max_length or not kind.has_backbone, fewer
    divides = train.batch_size % train.accumulate == 0
    yield "train.accumulate", divides, f"it has to divide train.batch_size {train.batch_size}"
    # What a run starts from.
    path, start, named = train.frozen_backbone, train.start_from, "name a drafter's folder, or leave it out"
    counted = f"the draft vocabulary of drafter.head {head} is counted in the rows of each run, so it takes no weights"
    yield "train.start_from", start is None or (bool(start) and kind.has_backbone), f"{named}; {counted}"
    both = "it gives all weights, and train.frozen_backbone would replace some of them; leave one of the two out"
    yield "train.start_from", start is None or path is None, both
    yield "train.frozen_backbone", path is None or bool(path), named
    # λ moves weight from the head's loss to the backbone's.
    trains = path is None or train.lambda_start == 0 or bool(unread("train.lambda_start", head, train.loss))
    nothing = "the base loss has nothing to train on train.frozen_backbone; set --config.train.lambda_start=0"
    yield "train.lambda_start", trains, nothing
    if command == "dry_run":  # which needs no rows
        return
    yield "data.train", bool(data.train), "name the training rows, as --config.data.train=ROWS.jsonl"
    if evaluation.final:
        needs = (
            "eval.final is True and needs held-out prompts; give --config.eval.prompts=PROMPTS.jsonl, or turn it off"
        )
        yield "eval.prompts", bool(evaluation.prompts), needs
        for refused in (refused_mode(mode, kind) for mode in modes):
            yield "drafter.head", not refused, f"of decode.modes, which eval.final decodes in, {refused}"
        drafts = not kind.has_backbone and set(modes) - {BASELINE}
        has_one = f"a drafter of drafter.head {head} has a draft vocabulary already; set it to 0"
        yield "decode.draft_vocab", not (decode.draft_vocab and drafts), has_one


def _mesh_rules(section: str, mesh) -> Iterator[Rule]:
    rest = [f"{section}.{axis}" for axis, size in mesh.items() if size == -1]
    for axis, size in mesh.items():
        yield f"{section}.{axis}", size != 0, "give a number of devices, or -1 for the rest"
    for key in rest[1:]:
        yield key, False, f"{rest[0]} is -1 too, and only one can be the rest"
