"""The checks of a recipe before anything is loaded: the range of each key, and what keys ask of each other.

A range is declared with its key (runtime/keys.py). What a head asks of the recipe is in the head's file, what decode
settings ask of each other in method/settings.py and decoding/settings.py, and what a drafter's shape asks of its target
in method/config.py.
"""

import functools
import operator
from collections.abc import Collection

from ml_collections import config_dict

from domino_jax.decoding.settings import BASELINE, MODES, refused_mode
from domino_jax.method.drafters import CONFIGS
from domino_jax.method.settings import Problem, TreeSettings
from domino_jax.recipe.open_keys import decode_settings, modes_of
from domino_jax.recipe.readers import unread, unread_keys
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.keys import walk

# (whether it is fine, the recipe's key, what to change)
Rule = tuple[bool, str, str]


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
            require(config, False, key, change)
    rules = [*_mesh_rules("mesh", config.mesh), *_decode_rules(config)]
    if command in ("train", "dry_run"):  # the others take a drafter as it is
        rules += [*_training_rules(config), *_start_rules(config)]
    if command == "train":
        rules += _data_rules(config)
    unread_here = list(unread_keys(config, command, set_keys, given))
    for rule in [*((False, entry.key, entry.why) for entry in unread_here if entry.refused), *rules]:
        require(config, *rule)
    for entry in unread_here:
        print(f"note: config.{entry.key} is not read here: {entry.why}.", flush=True)
    refuse(decode_settings(config.decode, config.drafter.head).problem())
    refuse(TreeSettings(**config.decode.tree).problem())
    if command == "train" and config.eval.final:
        _check_final_decoding(config)


def require(config, fine: bool, key: str, change: str) -> None:
    """DominoError by the recipe's key and its value unless `fine`."""
    if not fine:
        value = functools.reduce(operator.getitem, key.split("."), config)
        raise DominoError(f"config.{key} is {value!r}: {change}.")


def refuse(problem: Problem | None) -> None:
    """DominoError for a problem of the decode section, if there is one."""
    if problem:
        raise DominoError(f"config.decode.{problem}")


# -------------------------------------------------------------------------------------------------- drafter, training


def _training_rules(config) -> list[Rule]:
    data, drafter, train = config.data, config.drafter, config.train
    anchors = train.num_anchors < data.max_length or not CONFIGS[config.drafter.head].has_backbone  # which draw none
    return [
        (
            not 0 < drafter.sliding_window < drafter.block_size,
            "drafter.sliding_window",
            f"give drafter.block_size {drafter.block_size} or more, or 0 for no window",
        ),
        (
            anchors,
            "train.num_anchors",
            f"a row of data.max_length {data.max_length} has one anchor less than tokens; change one of the two",
        ),
        (
            train.batch_size % train.accumulate == 0,
            "train.accumulate",
            f"it has to divide train.batch_size {train.batch_size}",
        ),
    ]


def _start_rules(config) -> list[Rule]:
    """What a run starts from."""
    head, train = config.drafter.head, config.train
    path, start = train.frozen_backbone, train.start_from
    return [
        (
            start is None or (bool(start) and CONFIGS[head].has_backbone),
            "train.start_from",
            f"name a drafter's folder, or leave it out; the draft vocabulary of drafter.head {head} is counted in the"
            " rows of each run, so it takes no weights",
        ),
        (
            start is None or path is None,
            "train.start_from",
            "it gives all weights, and train.frozen_backbone would replace some of them; leave one of the two out",
        ),
        (path is None or bool(path), "train.frozen_backbone", "name a drafter's folder, or leave it out"),
        (
            path is None or train.lambda_start == 0 or bool(unread("train.lambda_start", head, train.loss)),
            "train.lambda_start",  # λ takes from the head's loss what it gives to that of the backbone
            "the base loss has nothing to train on train.frozen_backbone; set --config.train.lambda_start=0",
        ),
    ]


def _data_rules(config) -> list[Rule]:
    """The rows and prompts of a training."""
    data, evaluation = config.data, config.eval
    return [
        (bool(data.train), "data.train", "name the training rows, as --config.data.train=ROWS.jsonl"),
        (
            bool(evaluation.prompts) or not evaluation.final,
            "eval.prompts",
            "eval.final is True and needs held-out prompts; give --config.eval.prompts=PROMPTS.jsonl, or turn it off",
        ),
    ]


# ------------------------------------------------------------------------------------------------- decoding, meshes


def _decode_rules(config) -> list[Rule]:
    modes = modes_of(config.decode, config.drafter.head)
    change = f"list some of {', '.join(MODES)}, as --config.decode.modes=\"('autoregressive','domino')\""
    return [(bool(modes), "decode.modes", change), *_mesh_rules("decode.mesh", config.decode.mesh)]


def _mesh_rules(section: str, mesh) -> list[Rule]:
    sizes = "give a number of devices, or -1 for the rest"
    rules = [(size != 0, f"{section}.{axis}", sizes) for axis, size in mesh.items()]
    rest = [f"{section}.{axis}" for axis, size in mesh.items() if size == -1]
    return rules + [(False, key, f"{rest[0]} is -1 too, and only one can be the rest") for key in rest[1:]]


def _check_final_decoding(config) -> None:
    """Refuses before the training what the final decoding would refuse after it."""
    decode, head = config.decode, config.drafter.head
    modes, kind = modes_of(decode, head), CONFIGS[head]
    for mode in modes:
        refused = refused_mode(mode, kind)
        require(config, refused is None, "drafter.head", f"of decode.modes, which eval.final decodes in, {refused}")
    chosen = decode.draft_vocab and not kind.has_backbone and set(modes) - {BASELINE}
    change = f"a drafter of drafter.head {head} has a draft vocabulary already; set it to 0"
    require(config, not chosen, "decode.draft_vocab", change)
